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
    // Exponents of the next quad, at bits 7..14 and 23..30. One look-up a value: lanes refill on their own here, and
    // look-ups of pairs, which fail for some lane every few steps, are slower.
    __device__ __forceinline__ uint2 quad(const u32* singles, u32 shift) {
        refill();
        u32 window = __funnelshift_lc(lo, hi, position), e[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            e[j] = singles[window >> 24];
            window = __funnelshift_l(0u, window, e[j]);
        }
        if (UNLIKELY((e[0] | e[1] | e[2] | e[3]) & (ESC_FLAG | ZERO_FLAG))) return slow_quad(singles, shift);
        position += (e[0] + e[1] + e[2] + e[3]) & 63u;
        return make_uint2(__byte_perm(e[0], e[1], 0x7632) + shift * BOTH_HALVES7,
                          __byte_perm(e[2], e[3], 0x7632) + shift * BOTH_HALVES7);
    }

  private:
    __device__ __forceinline__ uint2 slow_quad(const u32* singles, u32 shift) {
        uint2 out = make_uint2(0, 0);
#pragma unroll 1
        for (u32 j = 0; j < 4; j++) {
            refill();
            u32 window = __funnelshift_l(lo, hi, position), entry = singles[window >> 24], length = entry & 31u;
            u32 exponent = entry & ZERO_FLAG ? 0u : ((entry >> 23) + shift) & 255u;
            position += length;
            if (entry & ESC_FLAG) {
                exponent = (window << length) >> 24;
                position += 8;
            }
            u32 placed = exponent << (j & 1 ? 23 : 7);
            if (j < 2)
                out.x |= placed;
            else
                out.y |= placed;
        }
        return out;
    }
};

struct FixedEncoder {
    u64 bits;
    u32 count, total, limit;
    u32 coded;     // quads coded so far
    bool stopped;  // a quad did not fit: the stream spills from quad `coded` on
    u32* out;      // the lane's next word

    __device__ __forceinline__ void init(u32* slot, u32 capacity, u32 lane) {
        out = slot + lane;
        bits = 0;
        count = total = coded = 0;
        limit = capacity * 32;
        stopped = false;
    }
    __device__ __forceinline__ bool fits(u32 length) const { return !stopped && total + length <= limit; }

    __device__ __forceinline__ void append(u32 code, u32 length) {  // length <= 32
        bits = bits << length | code;
        count += length;
        total += length;
        if (count >= 32) {
            count -= 32;
            *out = (u32)(bits >> count);
            out += 32;
        }
    }
    // Code one quad of any kind, or nothing once one did not fit.
    __device__ __forceinline__ void quad(const u32* single, uint2 v, u32 shift) {
        u32 e[4] = {(v.x >> 7) & 255u, v.x >> 23, (v.y >> 7) & 255u, v.y >> 23}, half[2], size[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            half[h] = size[h] = 0;
#pragma unroll
            for (int j = 2 * h; j < 2 * h + 2; j++) {
                u32 q = single[symbol_of(e[j], shift)];
                u32 own = (q >> 8) & 255u, bits_now = q & 31u;
                if (q & ESCAPED) {
                    own = own << 8 | e[j];
                    bits_now += 8;
                }
                half[h] = half[h] << bits_now | own;
                size[h] += bits_now;
            }
        }
        stopped = !fits(size[0] + size[1]);
        if (stopped) return;
        coded++;
        append(half[0], size[0]);
        append(half[1], size[1]);
    }
    __device__ __forceinline__ void finish() {
        if (count) *out = (u32)(bits << (32 - count));
    }
};
