// Pooled streams (docs/format.md, sections 5 and 6): a warp's 32 lanes share the words of one slot, handed out in
// the order in which a decoder asks for them. Both directions work on spans, two steps at a time, because words are
// asked for once a span but for rare lanes.

__device__ __forceinline__ u32 lanes_below(u32 lane) { return (1u << lane) - 1u; }

// Shifts that saturate at 32: the operators of C leave 32 undefined, and a wrapping shift would leave the value.
__device__ __forceinline__ u32 shift_left(u32 value, u32 by) {
    u32 out;
    asm("shl.b32 %0, %1, %2;" : "=r"(out) : "r"(value), "r"(by));
    return out;
}

// Exponents of a pair of values with those of zeros masked out.
__device__ __forceinline__ u32 clear_zeros(u32 entry, u32 exponents) {
    u32 zeros = entry & PAIR_ZEROS;
    return exponents & ~(zeros - (zeros >> 8));
}

struct PooledDecoder {
    u32 hi, lo, position;  // of the lane: its last two words, bits of them that are used up
    u32 handed, literals, below, last;
    const u32* slot;

    __device__ __forceinline__ void init(const u32* words, u32 capacity, u32 lane) {
        slot = words;
        last = capacity - 1;
        hi = words[lane];
        lo = words[32 + lane];
        position = literals = 0;
        handed = 64;
        below = lanes_below(lane);
    }

    // Lanes that `need` one get their next word. Without a branch: every lane loads.
    __device__ __forceinline__ void ask(bool need) {
        u32 asking = __ballot_sync(FULL_WARP, need);
        u32 word = slot[min(handed + __popc(asking & below), last)];
        hi = need ? lo : hi;
        lo = need ? word : lo;
        position -= need ? 32 : 0;
        handed += __popc(asking);
    }
    // Before an even step.
    __device__ __forceinline__ void ask() { ask(position >= 32); }

    // Look at two steps through `pairs`: entries of the lane's eight values and the position behind them. True in lanes
    // where they are not all good. Nothing but the even step's request has happened then.
    __device__ __forceinline__ bool look(const u32* pairs, u32 (&e)[4], u32& next) {
        ask();
        u32 window = __funnelshift_lc(lo, hi, position), rest = shift_left(lo, position);
        e[0] = pairs[window >> (32 - PAIR_BITS)];
        e[1] = pairs[__funnelshift_l(0u, window, e[0]) >> (32 - PAIR_BITS)];
        window = __funnelshift_l(rest, window, e[0] + e[1]);
        e[2] = pairs[window >> (32 - PAIR_BITS)];
        e[3] = pairs[__funnelshift_l(0u, window, e[2]) >> (32 - PAIR_BITS)];
        next = position + ((e[0] + e[1] + e[2] + e[3]) & 63u);
        return (((e[0] | e[1] | e[2]) | e[3]) & (PAIR_SLOW | PAIR_ZEROS)) || next > 64;
    }

    // Exponents, at bits 7..14 and 23..30, from what `look` gave; `rare`: where it was true in some lane.
    __device__ __forceinline__ void take(const u32* singles, const u32 (&e)[4], u32 next, bool rare, u32 shift,
                                         u32 (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = e[i] + shift * BOTH_HALVES7;
        if (UNLIKELY(rare)) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[i] = clear_zeros(e[i], x[i]);
            if (__any_sync(FULL_WARP, (((e[0] | e[1] | e[2]) | e[3]) & PAIR_SLOW) || next > 64)) {
                // Where the first step's entries are good they stay.
                bool again = __any_sync(FULL_WARP, (e[0] | e[1]) & PAIR_SLOW);
                if (!again) position += e[0] + e[1] & 31u;
                slow_steps(singles, again ? 0 : 1, 2, shift, x);
                next = position;
            }
        }
        position = next;
    }

    // Exponents of the lane's eight values of two steps.
    __device__ __forceinline__ void span(const u32* pairs, const u32* singles, u32 shift, u32 (&x)[4]) {
        u32 e[4], next;
        bool rare = __any_sync(FULL_WARP, look(pairs, e, next));
        take(singles, e, next, rare, shift, x);
    }

    // Steps [from, to) of a span, of any kind; `ask` came before.
    __device__ __forceinline__ void slow_steps(const u32* singles, u32 from, u32 to, u32 shift, u32 (&x)[4]) {
#pragma unroll 1
        for (u32 odd = from; odd < to; odd++) {
            uint2 quad = slow_step(singles, odd, shift);
            if (odd)
                x[2] = quad.x, x[3] = quad.y;
            else
                x[0] = quad.x, x[1] = quad.y;
        }
    }

    // One step of any kind; for an even one `ask` came before.
    __device__ __forceinline__ uint2 slow_step(const u32* singles, bool odd, u32 shift) {
        u32 e[4], length;
        while (true) {
            u32 a = position < 32 ? hi : lo, b = position < 32 ? lo : 0u;
            u32 window = position < 64 ? __funnelshift_l(b, a, position) : 0u;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                e[j] = singles[window >> 24];
                window = __funnelshift_l(0u, window, e[j]);
            }
            length = (e[0] + e[1] + e[2] + e[3]) & 63u;
            bool need = odd && position + length > 64;
            if (!__any_sync(FULL_WARP, need)) break;
            ask(need);  // at most once: a quad has at most 32 bits
        }
        position += length;
        u32 x[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            x[i] = (e[2 * i] >> 16 | (e[2 * i + 1] & 0x7f800000u)) + shift * BOTH_HALVES7;
        if (__any_sync(FULL_WARP, (e[0] | e[1] | e[2] | e[3]) & (ESC_FLAG | ZERO_FLAG))) {
            const u32 end = last * 4 + 3;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bool escape = e[j] & ESC_FLAG;
                u32 mask = __ballot_sync(FULL_WARP, escape), exponent = 0;
                if (escape) exponent = ((const u8*)slot)[end - min(literals + __popc(mask & below), end)];
                literals += __popc(mask);
                if (e[j] & (ESC_FLAG | ZERO_FLAG)) {
                    const int place = j & 1 ? 23 : 7;
                    x[j / 2] = (x[j / 2] & ~(255u << place)) | exponent << place;
                }
            }
        }
        return make_uint2(x[0], x[1]);
    }
};

// Tables of one book in shared memory.
struct EncodeTables {
    const u32 *pairs, *single;
    u32 origin;  // window_origin
};
#define ENCODE_TABLE_WORDS (ENCODE_PAIRS_WORDS + ENCODE_WORDS)

// Starts copying them: see stage_table.
__device__ __forceinline__ EncodeTables stage_encode_tables(u32* to, const u32* book) {
    stage_table(to, book + TABLE_ENCODE_PAIRS, ENCODE_PAIRS_WORDS);
    stage_table(to + ENCODE_PAIRS_WORDS, book + TABLE_ENCODE, ENCODE_WORDS);
    return {to, to + ENCODE_PAIRS_WORDS, window_origin(book[TABLE_WINDOW])};
}

struct PooledEncoder {
    u64 bits;
    u32 count, handed, literals, below;
    u32 limit;         // words that may be handed out beside the literals; 0 once a step did not fit
    u32 word0, word1;  // of the lane: its two words that are handed out and not yet written
    u32* slot;         // in shared or global memory

    __device__ __forceinline__ void init(u32* words, u32 capacity, u32 lane) {
        slot = words;
        limit = capacity < 64 ? 0 : capacity;
        bits = 0;
        count = literals = 0;
        word0 = lane;
        word1 = 32 + lane;
        handed = 64;
        below = lanes_below(lane);
    }

    // Lanes that `need` one get their next word; `asking`: the ballot of `need`. The store alone is conditional.
    __device__ __forceinline__ void ask(bool need, u32 asking) {
        u32 left = count - 32, next = handed + __popc(asking & below);
        u32 word = __funnelshift_rc((u32)bits, (u32)(bits >> 32), left);
        if (need) slot[word0] = word;
        word0 = need ? word1 : word0;
        word1 = need ? next : word1;
        count = need ? left : count;
        handed += __popc(asking);
    }

    // Append at most 31 bits, but for `count`; only the lowest five bits of `length` count.
    __device__ __forceinline__ void append(u32 code, u32 length) {
        u32 high = __funnelshift_l((u32)bits, (u32)(bits >> 32), length);
        u32 low = __funnelshift_l(0u, (u32)bits, length) | code;
        bits = (u64)high << 32 | low;
    }

    // Code one step of any kind, or nothing once a step did not fit: `limit` is 0 then.
    __device__ __forceinline__ void slow_step(const u32* single, u32 capacity, u32 step, uint2 quad, u32 shift) {
        u32 e[4] = {(quad.x >> 7) & 255u, quad.x >> 23, (quad.y >> 7) & 255u, quad.y >> 23}, mask[4];
        u32 found = 0, code = 0, length = 0;
        bool escapes[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 q = single[symbol_of(e[j], shift)];
            escapes[j] = q & ESCAPED;
            mask[j] = __ballot_sync(FULL_WARP, escapes[j]);
            found += __popc(mask[j]);
            code = code << (q & 31u) | ((q >> 8) & 255u);
            length += q & 31u;
        }
        bool need = step & 1 ? count + length > 64 : count >= 32;
        u32 asking = __ballot_sync(FULL_WARP, need);
        if (!limit) return;
        if ((handed + __popc(asking)) * 4 + literals + found > capacity * 4) {
            limit = 0;
            return;
        }
        if (found) {
            u8* next = (u8*)(slot + capacity) - 1 - literals;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (escapes[j]) *(next - __popc(mask[j] & below)) = (u8)e[j];
                next -= __popc(mask[j]);
            }
            literals += found;
            limit = capacity - (literals + 3) / 4;
        }
        ask(need, asking);
        bits = bits << length | code;
        count += length;
    }

    // End the streams (at most 64 bits a lane are left) and clear what nothing was written to.
    __device__ __forceinline__ void finish(u32 capacity, u32 lane) {
        if (capacity < 64) {  // nothing is ever coded
            for (u32 i = lane; i < capacity; i += 32)
                slot[i] = 0;
            return;
        }
        u64 left = count ? bits << (64 - count) : 0;
        slot[word0] = (u32)(left >> 32);
        slot[word1] = (u32)left;
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

// Whether an exponent of a quad is zero.
__device__ __forceinline__ bool has_zero(uint2 e) {
    return !(e.x & 0xffffu) || !(e.x >> 16) || !(e.y & 0xffffu) || !(e.y >> 16);
}

// Sum of the exponents of two quads, times 128.
__device__ __forceinline__ u32 exponent_sum(uint2 a, uint2 b) {
    return __dp2a_lo(b.x + b.y, 0x0101u, __dp2a_lo(a.x + a.y, 0x0101u, 0u));
}

// Mean exponent of a span of 256 values without zeros, halves up.
__device__ __forceinline__ u32 span_shift(uint2 a, uint2 b) {
    return (__reduce_add_sync(FULL_WARP, exponent_sum(a, b)) + (128u << 7)) >> 15;
}

// Mean of the non-zero exponents of a span, halves up; 0 where all are zero.
__device__ __forceinline__ u32 span_shift_zeros(uint2 a, uint2 b) {
    u32 parts[4] = {a.x, a.y, b.x, b.y}, count = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        count += ((parts[i] & 0xffffu) != 0) + ((parts[i] >> 16) != 0);
    // The sum is at most 65,280, the count 256.
    u32 both = __reduce_add_sync(FULL_WARP, exponent_sum(a, b) >> 7 | count << 18);
    u32 sum = both & 0x3ffffu;
    count = both >> 18;
    return count ? (sum + count / 2) / count : 0u;
}

// Slots are aligned to 16 bytes and their capacity is a multiple of 4 words.
__device__ __forceinline__ void clear_slot(u32* to, u32 capacity, u32 lane) {
    for (u32 i = lane; i < capacity / 4; i += 32)
        ((uint4*)to)[i] = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void store_slot(u8* to, const u32* from, u32 capacity, u32 lane) {
    for (u32 i = lane; i < capacity / 4; i += 32)
        ((uint4*)to)[i] = ((const uint4*)from)[i];
}
