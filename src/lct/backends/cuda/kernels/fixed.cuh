// Fixed streams (docs/format.md, section 7): every lane owns C words; word i of lane l is word 32 i + l
// of the group's slot, so that lanes never meet in a bank. Literals follow their escape in the stream.

struct FixedDecoder {
    u32 hi, lo, position, next;
    const u32* words;  // of this lane
    u32 last;

    __device__ __forceinline__ void init(const u32* slot, u32 capacity, u32 lane) {
        words = slot + lane;
        last = capacity - 1;
        hi = words[0];
        lo = words[32 * min(1u, last)];
        position = 0;
        next = 2;
    }
    __device__ __forceinline__ void refill() {
        if (position >= 32) {
            hi = lo;
            lo = words[32 * min(next, last)];
            next++;
            position -= 32;
        }
    }
    // Exponents of the next quad at bits 7..14 and 23..30 of x and y.
    __device__ __forceinline__ void quad(const u32* table, u32 offset, u32& x, u32& y) {
        refill();
        u32 window = __funnelshift_l(lo, hi, position), e[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            e[j] = table[window >> 24];
            window = __funnelshift_l(0u, window, e[j]);
        }
        if ((e[0] | e[1] | e[2] | e[3]) & SPECIAL_FLAGS) {
#pragma unroll 1
            for (int j = 0; j < 4; j++) {
                refill();
                window = __funnelshift_l(lo, hi, position);
                u32 entry = table[window >> 24], length = entry & 31u, value = entry + (offset << 16);
                position += length;
                if (entry & ESC_FLAG) {
                    value = (window << length) >> 24 << 23;
                    position += 8;
                } else if (entry & ZERO_FLAG) {
                    value = 0;
                }
                // A register array with a run-time index would go to local memory.
                if (j == 0) e[0] = value;
                if (j == 1) e[1] = value;
                if (j == 2) e[2] = value;
                if (j == 3) e[3] = value;
            }
            offset = 0;
        } else {
            position += (e[0] + e[1] + e[2] + e[3]) & 63;
        }
        x = __byte_perm(e[0], e[1], 0x7632) + offset;
        y = __byte_perm(e[2], e[3], 0x7632) + offset;
    }
};

struct FixedEncoder {
    u64 bits;
    u32 count, total, limit;
    u32* out;  // the lane's next word

    __device__ __forceinline__ void init(u32* slot, u32 capacity, u32 lane) {
        out = slot + lane;
        bits = 0;
        count = total = 0;
        limit = capacity * 32;
    }
    __device__ __forceinline__ void append(u32 code, u32 length) {  // length <= 32
        bits = bits << length | code;
        count += length;
        if (count >= 32) {
            count -= 32;
            *out = (u32)(bits >> count);
            out += 32;
        }
    }
    // Code one quad; false (nothing changed) where it does not fit into the stream.
    __device__ __forceinline__ bool quad(const u32* pair, const u32* single, u32 window, uint2 v, u32 shift) {
        const u32 MASK4 = PACKED_BYTES << 2;
        u32 ax = (v.x >> 5) & MASK4, ay = (v.y >> 5) & MASK4;
        u32 rotate = (128u + 256u - shift - window) * 0x00040004u;
        u32 rx = (ax + rotate) & MASK4, ry = (ay + rotate) & MASK4;
        u32 qx = *(const u32*)((const u8*)pair + ((rx | rx >> 12) & 0x3fcu));
        u32 qy = *(const u32*)((const u8*)pair + ((ry | ry >> 12) & 0x3fcu));
        // Exponent 0 has its own symbol: (a - 4) borrows from bit 15 of its half where a is 0.
        bool zeros = ((ax | 0x80008000u) - 0x00040004u & (ay | 0x80008000u) - 0x00040004u & 0x80008000u) != 0x80008000u;
        if (((rx | ry) & 0x03c003c0u) | ((qx | qy) & SLOW) || zeros) return escaped(single, ax, ay, shift);
        u32 length = (qx + qy) & 63u;
        if (total + length > limit) return false;
        total += length;
        append(__funnelshift_l(0u, qx >> 16, qy) | qy >> 16, length);
        return true;
    }
    __device__ __forceinline__ bool escaped(const u32* single, u32 ax4, u32 ay4, u32 shift) {
        u32 e[4] = {(ax4 >> 2) & 255u, ax4 >> 18, (ay4 >> 2) & 255u, ay4 >> 18}, q[4];
        u32 length = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            q[j] = single[((e[j] - shift + 128u) & 255u) | (e[j] ? 256u : 0u)];
            length += (q[j] & 31u) + (q[j] & ESCAPED ? 8u : 0u);
        }
        if (total + length > limit) return false;
        total += length;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 code = (q[j] >> 8) & 255u, bits_now = q[j] & 31u;
            if (q[j] & ESCAPED) {
                code = code << 8 | e[j];
                bits_now += 8;
            }
            append(code, bits_now);
        }
        return true;
    }
    __device__ __forceinline__ void finish() {
        if (count) *out = (u32)(bits << (32 - count));
    }
};
