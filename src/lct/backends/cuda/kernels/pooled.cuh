// Pooled streams (docs/format.md, sections 5 and 6): a warp's 32 lanes share the words of one slot,
// handed out in the order in which a decoder asks for them. The slot lies in shared memory.

__device__ __forceinline__ u32 lanes_below(u32 lane) { return (1u << lane) - 1u; }

// (shift - 128) << 7 in both halves.
__device__ __forceinline__ u32 shift_offset(u32 shift) { return (shift * 0x00010001u - 0x00800080u) << 7; }

struct Resolved {
    uint4 entries;
    u32 literals;
};

// The entries of a quad with zeros and escapes replaced by (exponent << 23) - (offset << 16). Not inlined: it
// runs for one step in a hundred, and a dozen copies would push the hot loop out of the instruction cache.
__device__ __noinline__ Resolved resolve_quad(uint4 entries, u32 offset, const u32* slot, u32 capacity, u32 literals,
                                              u32 below) {
    u32 e[4] = {entries.x, entries.y, entries.z, entries.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 flags = e[j] & SPECIAL_FLAGS, value = 0, last = capacity * 4 - 1;
        u32 mask = __ballot_sync(FULL_WARP, flags & ESC_FLAG);
        if (flags & ESC_FLAG) value = (u32)((const u8*)slot)[last - min(literals + __popc(mask & below), last)] << 23;
        literals += __popc(mask);
        if (flags) e[j] = value - (offset << 16);
    }
    return {make_uint4(e[0], e[1], e[2], e[3]), literals};
}

// CAN_DETACH: the slot in shared memory may be overwritten while it is being read; `detach` then goes on
// with the slot in global memory.
template <bool CAN_DETACH>
struct PooledDecoder {
    u32 hi, lo, position, handed, literals, below;
    const u32* slot;
    u32 capacity;
    bool detached;

    __device__ __forceinline__ void init(const u32* words, u32 capacity_words, u32 lane) {
        slot = words;
        capacity = opaque(capacity_words);
        hi = words[lane];
        lo = words[32 + lane];
        position = 0;
        handed = 64;
        literals = 0;
        below = lanes_below(lane);
        detached = false;
    }
    __device__ __forceinline__ void detach() { detached = true; }

    // Table entries of the next quad of `group`: relative exponents at bits 23..30, flags below.
    __device__ __forceinline__ void quad(const u32* table, u32 (&e)[4], const Args& a, u32 group) {
        bool need = position >= 32;
        u32 asking = __ballot_sync(FULL_WARP, need);
        if (need) {
            u32 index = min(handed + __popc(asking & below), capacity - 1);
            hi = lo;
            if (CAN_DETACH && UNLIKELY(detached))
                lo = slot_in_payload(a, group)[index];
            else
                lo = slot[index];
            position -= 32;
        }
        handed += __popc(asking);
        u32 window = __funnelshift_l(lo, hi, position);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            e[j] = table[window >> 24];
            window = __funnelshift_l(0u, window, e[j]);
        }
        position += (e[0] + e[1] + e[2] + e[3]) & 63;
    }

    // Replace the entries of zeros and escapes, so that adding `offset` gives their exponents as well. For a
    // slot that stays (step.cuh has its own for one that does not).
    __device__ __forceinline__ void resolve(u32 (&e)[4], u32 offset) {
        Resolved r = resolve_quad(make_uint4(e[0], e[1], e[2], e[3]), offset, slot, capacity, literals, below);
        e[0] = r.entries.x, e[1] = r.entries.y, e[2] = r.entries.z, e[3] = r.entries.w;
        literals = r.literals;
    }
};

// Whether any entry of the warp's quads is a zero or an escape.
__device__ __forceinline__ bool any_special(const u32 (&a)[4], const u32 (&b)[4]) {
    u32 all = (a[0] | a[1] | a[2]) | (a[3] | b[0] | b[1]) | (b[2] | b[3]);
    return __any_sync(FULL_WARP, all & SPECIAL_FLAGS);
}

// Four words from table entries, the shift's offset and sign-fraction bytes.
__device__ __forceinline__ uint2 join_entries(u32 sf, const u32 (&e)[4], u32 offset) {
    return join4(sf, __byte_perm(e[0], e[1], 0x7632) + offset, __byte_perm(e[2], e[3], 0x7632) + offset);
}

// Byte offset into the pair table of two symbols (times 4, in 16-bit halves, noise from bit 6 on): entry
// low + 37 * high. The odd stride spreads the few pairs that are common over the banks.
__device__ __forceinline__ u32 pair_offset(u32 r) { return ((r & 0x003c003cu) * (0x10000u + PAIR_STRIDE)) >> 16; }

// Tables of one book: pairs in shared memory, single symbols (rarely used) in global memory.
struct EncodeTables {
    const u32* pair;
    const u32* single;
    u32 window;  // first symbol of the pair table
};

// Whether the exponents of a group differ from its `first`, four steps at a time, while none has so far.
__device__ __forceinline__ void note_differences(u32 step0, const uint2* e4, u32& first, u32& differs) {
    if (UNLIKELY(!differs)) {
        if (step0 == 0) first = __shfl_sync(FULL_WARP, (e4[0].x & 0xffffu) * 0x00010001u, 0);
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k++)
            differs |= (e4[k].x ^ first) | (e4[k].y ^ first);
        differs = __any_sync(FULL_WARP, differs);
    }
}

// Smallest of each 16-bit half.
__device__ __forceinline__ u32 min3_halves(u32 a, u32 b, u32 c) { return __vimin3_u16x2(a, b, c); }

// Codes of two pairs of values from the pair table as one code; its length.
__device__ __forceinline__ u32 quad_code(u32 qx, u32 qy) { return __funnelshift_l(0u, qx >> 16, qy) | qy >> 16; }
__device__ __forceinline__ u32 quad_length(u32 qx, u32 qy) { return (qx + qy) & 63u; }

// Bits of r (two symbols times 4, noise above) that are set where a symbol lies outside the pair table.
#define OUTSIDE_WINDOW 0x03c003c0u

#define LITERAL_BUFFER 256u  // bytes

struct PooledEncoder {
    u64 bits;
    u32 count, handed, literals, below, capacity;
    u32 *slot, *word0, *word1;  // the lane's two words that are handed out and not yet written
    u8* literal_buffer;         // null: literals go to the end of the slot
    u32 coded;                  // steps coded so far
    bool stopped;               // a step did not fit: the group spills from step `coded` on

    __device__ __forceinline__ void init(u32* words, u32 capacity_words, u32 lane) {
        slot = words;
        capacity = opaque(capacity_words);
        bits = 0;
        count = coded = literals = 0;
        literal_buffer = nullptr;
        word0 = slot + lane;
        word1 = slot + 32 + lane;
        handed = 64;
        below = lanes_below(lane);
        stopped = capacity_words < 64;
    }

    // Whether steps that add `length` bits before the last of them, and `more` literals, fit.
    __device__ __forceinline__ bool fits(u32 length, u32 more) const {
        u32 words = handed + __reduce_add_sync(FULL_WARP, (count + length) >> 5);
        return !stopped && words * 4 + literals + more <= capacity * 4;
    }

    // Append a quad's code, at most 32 bits, which `fits`.
    __device__ __forceinline__ void append(u32 code, u32 length) {
        bool need = count >= 32;
        u32 asking = __ballot_sync(FULL_WARP, need);
        if (need) {
            count -= 32;
            *word0 = (u32)(bits >> count);
            word0 = word1;
            word1 = slot + (handed + __popc(asking & below));
        }
        handed += __popc(asking);
        bits = bits << length | code;
        count += length;
    }

    // Code one quad (exponents times 4) of any kind, or nothing once a step did not fit.
    __device__ __forceinline__ void quad(const u32* single, uint2 e4, u32 shift) {
        u32 e[4] = {(e4.x >> 2) & 255u, e4.x >> 18, (e4.y >> 2) & 255u, e4.y >> 18}, mask[4];
        u32 found = 0, code = 0, length = 0;
        bool escapes[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 q = single[((e[j] - shift + 128u) & 255u) | (e[j] ? 256u : 0u)];
            escapes[j] = q & ESCAPED;
            mask[j] = __ballot_sync(FULL_WARP, escapes[j]);
            found += __popc(mask[j]);
            code = code << (q & 31u) | ((q >> 8) & 255u);
            length += q & 31u;
        }
        stopped = !fits(0, found);
        if (stopped) return;
        if (literal_buffer && literals + found > LITERAL_BUFFER) move_literals();
        u8* next = (literal_buffer ? literal_buffer + LITERAL_BUFFER : (u8*)(slot + capacity)) - 1 - literals;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (escapes[j]) *(next - __popc(mask[j] & below)) = (u8)e[j];
            next -= __popc(mask[j]);
        }
        literals += found;
        coded++;
        append(code, length);
    }

    // While the end of the slot is still in use, literals go to a buffer.
    __device__ __forceinline__ void move_literals() {
        const u8* end = literal_buffer + LITERAL_BUFFER;
        for (u32 i = __popc(below); i < literals; i += 32)
            ((u8*)(slot + capacity))[-1 - (int)i] = end[-1 - (int)i];
        literal_buffer = nullptr;
        __syncwarp();
    }

    // End the streams (at most 63 bits a lane are left) and clear what nothing was written to.
    __device__ __forceinline__ void finish(u32 lane) {
        if (capacity < 64) {  // nothing is ever coded
            for (u32 i = lane; i < capacity; i += 32)
                slot[i] = 0;
            return;
        }
        u64 left = count ? bits << (64 - count) : 0;
        *word0 = (u32)(left >> 32);
        *word1 = count > 32 ? (u32)left : 0u;
        if (literal_buffer) move_literals();
        u32 end = capacity * 4 - literals;
        for (u32 i = handed + lane; i < (end + 3) / 4; i += 32) {
            if (i * 4 + 4 <= end)
                slot[i] = 0;
            else
                for (u32 b = i * 4; b < end; b++)
                    ((u8*)slot)[b] = 0;
        }
    }
};

// Of the smallest exponents of each half: is either zero?
__device__ __forceinline__ bool has_zero_half(u32 m) { return !(m & 0xffffu) || !(m >> 16); }

// Mean exponent of a span of 256 values without zeros; quads as exponents times 4.
__device__ __forceinline__ u32 span_shift(uint2 a, uint2 b) {
    u32 sum = a.x + a.y + b.x + b.y;
    return (__reduce_add_sync(FULL_WARP, (sum & 0xffffu) + (sum >> 16)) + 512u) >> 10;
}

// Mean of the non-zero exponents of a span, halves up; 0 where all are zero.
__device__ __forceinline__ u32 span_shift_zeros(uint2 a, uint2 b) {
    u32 parts[4] = {a.x, a.y, b.x, b.y};
    u32 sum = 0, count = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum += ((parts[i] & 0xffffu) + (parts[i] >> 16)) >> 2;
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
__device__ __forceinline__ void stage_wait() {
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void clear_slot(u32* to, u32 capacity, u32 lane) {
    for (u32 i = lane; i < capacity / 4; i += 32)
        ((uint4*)to)[i] = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void store_slot(u8* to, const u32* from, u32 capacity, u32 lane) {
    for (u32 i = lane; i < capacity / 4; i += 32)
        ((uint4*)to)[i] = ((const uint4*)from)[i];
}
