// Codes one pooled group, a span at a time, from exponents in registers (docs/format.md, sections 5, 6 and 8): what
// encoding a dense tensor and the fused optimizer steps share.
//
// A span without zeros, escapes and spills takes the fast path; one vote decides.

// What a warp rarely needs of a group.
struct RareState {
    SpillChunk spill;
    u32 first;  // exponent of the group's first value, at bits 7..14 and 23..30
    u32 coded;  // where a step did not fit: the group spills from this step on
};

// RARE_IN_SHARED (a kernel's row in jit.py): kept in shared memory, where lane 0 writes it, because registers decide
// how many warps a multiprocessor holds. Else in registers, which is faster where they suffice.
#if RARE_IN_SHARED
typedef RareState* Rare;
#else
typedef RareState Rare[1];
#endif

struct GroupCoder {
    const Args* args;
    EncodeTables tables;
    PooledEncoder encoder;
    Rare rare;
    u32 group, lane, differs;
    u32 my_shift;  // of span `lane`: of the values before a step until that span is coded

    // `old_chunk`: of the group's present state, or NO_CHUNK. `chunks`: for which there is credit.
    // RARE_IN_SHARED: `rare` is set before.
    __device__ __forceinline__ void init(const Args& payload, const EncodeTables& book, u32* slot, u32 old_chunk,
                                         int chunks, u32 group_number, u32 lane_number, u32 old_shift = 0) {
        args = &payload;
        tables = book;
        group = group_number;
        lane = lane_number;
        my_shift = old_shift;
        differs = 0;
        encoder.init(slot, capacity(), lane);
        SpillChunk spill;
        spill.init(payload, old_chunk, chunks);
        keep(spill);
    }
    __device__ __forceinline__ bool writes_rare() const { return !RARE_IN_SHARED || lane == 0; }
    __device__ __forceinline__ void keep(const SpillChunk& spill) {
        __syncwarp();
        if (writes_rare()) rare->spill = spill;
        __syncwarp();
    }
    // Where the group's spilled exponents go.
    __device__ __forceinline__ u8* spill_data() {
        SpillChunk spill = rare->spill;
        u8* data = spill.data(*args, group, lane);
        keep(spill);
        return data;
    }
    // One more chunk.
    __device__ __forceinline__ u32 take_chunk_too() {
        SpillChunk spill = rare->spill;
        u32 chunk = spill.take(*args, group, lane);
        keep(spill);
        return chunk;
    }
    __device__ __forceinline__ u32 capacity() const {
        return group >= args->full_groups ? args->tail_capacity : args->capacity;
    }

    // How two steps would be coded on the fast path.
    struct Plan {
        u32 shift, q[4], outside, length_a, length_b, asking, count;
        bool need, unfit;
    };

    // Plan two steps. True in lanes that do not take the fast path.
    __device__ __forceinline__ bool plan(uint2 a, uint2 b, Plan& p) const {
        p.shift = span_shift(a, b);
        u32 rotate = rotation(tables.origin, p.shift);
        u32 r[4] = {a.x + rotate, a.y + rotate, b.x + rotate, b.y + rotate};
#pragma unroll
        for (int i = 0; i < 4; i++)
            p.q[i] = *(const u32*)((const u8*)tables.pairs + pair_offset(r[i]));
        p.length_a = p.q[0] + p.q[1];
        p.length_b = p.q[2] + p.q[3];
        p.outside = ((r[0] | r[1] | r[2]) | r[3]) & OUTSIDE_WINDOW;
        p.need = encoder.count >= 32;
        p.asking = __ballot_sync(FULL_WARP, p.need);
        p.count = encoder.count - (p.need ? 32 : 0) + (p.length_a + p.length_b & 127u);
        p.unfit = encoder.handed + __popc(p.asking) > encoder.limit || shift_is_near_zero(p.shift);
        return is_slow(p) || p.unfit || !differs;
    }
    // SLOW entries and quads of 32 bits show in bits 5 to 7 of a sum of lengths; lanes that pass 64 would ask again.
    __device__ __forceinline__ static bool is_slow(const Plan& p) {
        return (p.outside | (p.length_a | p.length_b) & 0xe0u) || p.count > 64;
    }

    // Code steps `step`, which is even, and `step` + 1 as planned, where `plan` was false in all lanes.
    __device__ __forceinline__ void code(u32 step, const Plan& p) {
        encoder.ask(p.need, p.asking);
        encoder.append(quad_code(p.q[0], p.q[1]), p.length_a);
        encoder.append(quad_code(p.q[2], p.q[3]), p.length_b);
        encoder.count = p.count;
        my_shift = lane == step / 2 ? p.shift : my_shift;
    }
    // The same where it was true in some lane, of this tensor or another that is coded beside it.
    __device__ __forceinline__ void code_rare(u32 step, uint2 a, uint2 b, const Plan& p) {
        note_differences(step, a, b, 2);
        if (!__any_sync(FULL_WARP, is_slow(p) || p.unfit)) return code(step, p);
        u32 shift = p.shift;
        if (__any_sync(FULL_WARP, has_zero(a) || has_zero(b))) shift = span_shift_zeros(a, b);
        slow_span(step, a, b, 2, shift);
    }

    __device__ __forceinline__ void span(u32 step, uint2 a, uint2 b) {
        Plan p;
        if (UNLIKELY(__any_sync(FULL_WARP, plan(a, b, p))))
            code_rare(step, a, b, p);
        else
            code(step, p);
    }

    // The same for a span of any kind, and for the last step of a tail (`steps` is 1 and `b` zero then).
    __device__ __forceinline__ void any_span(u32 step, uint2 a, uint2 b, u32 steps) {
        note_differences(step, a, b, steps);
        slow_span(step, a, b, steps, span_shift_zeros(a, b));
    }

  private:
    // Whether all exponents of the group are equal, asked while that may still be: the fast path waits for it.
    __device__ __forceinline__ void note_differences(u32 step, uint2 a, uint2 b, u32 steps) {
        if (differs) return;
        if (step == 0) {
            u32 value = __shfl_sync(FULL_WARP, (a.x & 0xffffu) * 0x00010001u, 0);
            if (writes_rare()) rare->first = value;
            __syncwarp();
        }
        const u32 first = rare->first;
        u32 other = (a.x ^ first) | (a.y ^ first);
        if (steps == 2) other |= (b.x ^ first) | (b.y ^ first);
        differs = __any_sync(FULL_WARP, other);
    }

    __device__ __forceinline__ void slow_span(u32 step, uint2 a, uint2 b, u32 steps, u32 shift) {
#pragma unroll 1
        for (u32 odd = 0; odd < steps; odd++) {
            uint2 quad = odd ? b : a;
            const bool fitted = encoder.limit;
            encoder.slow_step(tables.single, capacity(), step + odd, quad, shift);
            if (encoder.limit) continue;
            if (writes_rare() && (fitted || step + odd == 0)) rare->coded = step + odd;
            u8* data = spill_data();
            *(u32*)(data + (step + odd) * 128 + lane * 4) = exponent_bytes(quad);
        }
        if (lane == step / 2) my_shift = encoder.limit || rare->coded > step ? shift : 0u;
    }

  public:
    // End the streams; returns the group's state word. The slot is complete after a __syncwarp.
    __device__ __forceinline__ u32 close() {
        __syncwarp();
        if (!differs) {
            clear_slot(encoder.slot, capacity(), lane);
            my_shift = 0;
            return STATE_CONSTANT << 24 | (rare->first >> 7 & 255u);
        }
        encoder.finish(capacity(), lane);
        return encoder.limit ? 0u : (STATE_SPILLED | rare->coded) << 24 | rare->spill.chunk;
    }

    // Write shifts and state into the payload, and give back a chunk that is not needed any more.
    __device__ __forceinline__ void commit(u32 state) {
        args->payload[args->lane_offset + (u64)group * 32 + lane] = (u8)my_shift;
        if (lane == 0) ((u32*)(args->payload + args->meta_offset))[group] = state;
        SpillChunk spill = rare->spill;
        spill.finish(*args, (state >> 24) & STATE_SPILLED || state >> 24 == STATE_WIDE, lane);
    }
};
