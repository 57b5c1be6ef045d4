// Pooled streams (docs/format.md, sections 5 and 6): a warp's 32 lanes share the words of one slot,
// handed out in the order in which a decoder asks for them. The slot lies in shared memory.

__device__ __forceinline__ u32 lanes_below(u32 lane) { return (1u << lane) - 1u; }

// (shift - 128) << 7 in both halves.
__device__ __forceinline__ u32 shift_offset(u32 shift) { return (shift * 0x00010001u - 0x00800080u) << 7; }

struct PooledDecoder {
    u32 hi, lo, position, handed, literals, below;
    const u32* slot;
    u32 capacity;

    __device__ __forceinline__ void init(const u32* words, u32 capacity_words, u32 lane) {
        slot = words;
        capacity = capacity_words;
        hi = words[lane];
        lo = words[32 + lane];
        position = 0;
        handed = 64;
        literals = 0;
        below = lanes_below(lane);
    }

    // Exponents of the next quad at bits 7..14 and 23..30 of x and y. `offset` = shift_offset(shift).
    __device__ __forceinline__ void quad(const u32* table, u32 offset, u32& x, u32& y) {
        bool need = position >= 32;
        u32 asking = __ballot_sync(FULL_WARP, need);
        if (need) {
            hi = lo;
            lo = slot[min(handed + __popc(asking & below), capacity - 1)];
            position -= 32;
        }
        handed += __popc(asking);
        u32 window = __funnelshift_l(lo, hi, position), e[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            e[j] = table[window >> 24];
            window = __funnelshift_l(0u, window, e[j]);
        }
        position += (e[0] + e[1] + e[2] + e[3]) & 63;
        if (__any_sync(FULL_WARP, (e[0] | e[1] | e[2] | e[3]) & SPECIAL_FLAGS)) {
            bool escapes = __any_sync(FULL_WARP, (e[0] | e[1] | e[2] | e[3]) & ESC_FLAG);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 flags = e[j] & SPECIAL_FLAGS;
                e[j] = flags ? 0u : e[j] + (offset << 16);
                if (escapes) {
                    u32 mask = __ballot_sync(FULL_WARP, flags & ESC_FLAG);
                    if (flags & ESC_FLAG) {
                        u32 last = capacity * 4 - 1;
                        e[j] = (u32)((const u8*)slot)[last - min(literals + __popc(mask & below), last)] << 23;
                    }
                    literals += __popc(mask);
                }
            }
            offset = 0;
        }
        x = __byte_perm(e[0], e[1], 0x7632) + offset;
        y = __byte_perm(e[2], e[3], 0x7632) + offset;
    }
};

// Tables of one book in shared memory, and what addresses them.
struct EncodeTables {
    const u32* pair;
    const u32* single;
    u32 window;  // first symbol of the pair table
};

struct PooledEncoder {
    u64 bits;
    u32 count, slot0, slot1, handed, literals, below, capacity;
    u32* slot;

    __device__ __forceinline__ void init(u32* words, u32 capacity_words, u32 lane) {
        slot = words;
        capacity = capacity_words;
        bits = 0;
        count = 0;
        slot0 = lane;
        slot1 = 32 + lane;
        handed = 64;
        literals = 0;
        below = lanes_below(lane);
    }

    // Code one quad; false (nothing changed) where the step does not fit: the group spills from here.
    // `zeros`: the warp may hold exponents 0, whose symbol is not relative to the shift.
    __device__ __forceinline__ bool quad(const EncodeTables& t, uint2 v, u32 shift, bool zeros) {
        const u32 MASK4 = PACKED_BYTES << 2;  // exponents times 4: byte offsets into the tables
        u32 ax = (v.x >> 5) & MASK4, ay = (v.y >> 5) & MASK4;
        u32 rotate = (128u + 256u - shift - t.window) * 0x00040004u;
        u32 rx = (ax + rotate) & MASK4, ry = (ay + rotate) & MASK4;
        u32 qx = *(const u32*)((const u8*)t.pair + ((rx | rx >> 12) & 0x3fcu));
        u32 qy = *(const u32*)((const u8*)t.pair + ((ry | ry >> 12) & 0x3fcu));
        u32 code = __funnelshift_l(0u, qx >> 16, qy) | qy >> 16;
        u32 length = (qx + qy) & 63u;
        bool need = count >= 32;
        u32 asking = __ballot_sync(FULL_WARP, need);
        bool slow = ((rx | ry) & 0x03c003c0u) | ((qx | qy) & SLOW);
        if (__any_sync(FULL_WARP, slow) || zeros) {
            if (!escaped(t, ax, ay, shift, handed + __popc(asking), code, length)) return false;
        } else if ((handed + __popc(asking)) * 4 + literals > capacity * 4) {
            return false;
        }
        if (need) {
            count -= 32;
            slot[slot0] = (u32)(bits >> count);
            slot0 = slot1;
            slot1 = handed + __popc(asking & below);
        }
        handed += __popc(asking);
        bits = bits << length | code;
        count += length;
        return true;
    }

    // The same for a step with zeros, escapes or symbols outside the pair table's window.
    __device__ __forceinline__ bool escaped(const EncodeTables& t, u32 ax4, u32 ay4, u32 shift, u32 words, u32& code,
                                            u32& length) {
        u32 e[4] = {(ax4 >> 2) & 255u, ax4 >> 18, (ay4 >> 2) & 255u, ay4 >> 18}, q[4];
        u32 found = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            q[j] = t.single[((e[j] - shift + 128u) & 255u) | (e[j] ? 256u : 0u)];
            found += __popc(__ballot_sync(FULL_WARP, q[j] & ESCAPED));
        }
        if (words * 4 + literals + found > capacity * 4) return false;
        u8* end = (u8*)(slot + capacity) - 1;
        code = 0;
        length = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (found) {
                u32 mask = __ballot_sync(FULL_WARP, q[j] & ESCAPED);
                if (q[j] & ESCAPED) *(end - (literals + __popc(mask & below))) = (u8)e[j];
                literals += __popc(mask);
            }
            code = code << (q[j] & 31u) | ((q[j] >> 8) & 255u);
            length += q[j] & 31u;
        }
        return true;
    }

    // Write what is left of the streams (at most 63 bits a lane).
    __device__ __forceinline__ void finish() {
        u64 left = count ? bits << (64 - count) : 0;
        if (count) slot[slot0] = (u32)(left >> 32);
        if (count > 32) slot[slot1] = (u32)left;
    }
};

// Smallest exponent of each half over a chunk tells whether any is zero.
__device__ __forceinline__ u32 min_halves(u32 a, u32 b) { return __vminu2(a, b); }
__device__ __forceinline__ bool has_zero_half(u32 m) { return !(m & 0xffffu) || !(m >> 16); }

// Sum of the exponents of a quad in both halves.
__device__ __forceinline__ u32 exponent_sum(uint2 v) { return exponents2(v.x) + exponents2(v.y); }

// Mean exponent of a span of 256 values without zeros.
__device__ __forceinline__ u32 span_shift(uint2 a, uint2 b) {
    u32 sum = exponent_sum(a) + exponent_sum(b);
    return (__reduce_add_sync(FULL_WARP, (sum & 0xffffu) + (sum >> 16)) + 128u) >> 8;
}

// Mean of the non-zero exponents of a span, halves up; 0 where all are zero.
__device__ __forceinline__ u32 span_shift_zeros(uint2 a, uint2 b) {
    u32 parts[4] = {exponents2(a.x), exponents2(a.y), exponents2(b.x), exponents2(b.y)};
    u32 sum = 0, count = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum += (parts[i] & 0xffffu) + (parts[i] >> 16);
        count += ((parts[i] & 0xffffu) != 0) + ((parts[i] >> 16) != 0);
    }
    u32 both = __reduce_add_sync(FULL_WARP, sum | count << 18);  // sum <= 65,280, count <= 256
    sum = both & 0x3ffffu;
    count = both >> 18;
    return count ? (sum + count / 2) / count : 0u;
}

// Copy a slot between global and shared memory; both aligned to 16 bytes, capacity a multiple of 4 words.
__device__ __forceinline__ void stage_slot(const u8* from, u32* to, u32 capacity, u32 lane) {
    for (u32 i = lane; i < capacity / 4; i += 32) {
        u32 address = (u32)__cvta_generic_to_shared((uint4*)to + i);
        asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(address), "l"((const uint4*)from + i));
    }
}
__device__ __forceinline__ void stage_wait() { asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void clear_slot(u32* to, u32 capacity, u32 lane) {
    for (u32 i = lane; i < capacity / 4; i += 32) ((uint4*)to)[i] = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void store_slot(u8* to, const u32* from, u32 capacity, u32 lane) {
    for (u32 i = lane; i < capacity / 4; i += 32) ((uint4*)to)[i] = ((const uint4*)from)[i];
}
