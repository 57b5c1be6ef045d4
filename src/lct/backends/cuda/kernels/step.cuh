// One pass of an optimizer over TENSORS compressed tensors (the parameter and its state): decode all, update, encode
// all (docs/format.md). The file of an optimizer defines TENSORS, `struct StepArgs` and `struct Update`:
//   __device__ Update(const StepArgs&);
//   __device__ void operator()(u32 (&values)[TENSORS][4], const u32 (&grad)[4]) const;
// on eight values of each tensor, packed BF16: the lane's quads of two steps. With DENSE_UPDATE it takes a `grad` that
// may be changed, and what it leaves there is stored as dense BF16 at `StepArgs.update`.
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l updates quad l of each step.
// Shared memory (dynamic): tables of every tensor, then the old slots of every warp, fetched with cp.async. A group's
// streams are written over the old ones in the payload while the old ones are read from shared memory, and its
// sign-fraction bytes span by span: safe because the credit for all that it may spill was certain before, so that
// nothing can fail any more.

#define STEP_TABLE_WORDS (PAIRS_WORDS + SINGLES_WORDS + ENCODE_TABLE_WORDS)

// The values of one tensor's group before the step.
struct OldGroup {
    PooledDecoder decoder;
    const u32 *pairs, *singles;
    u32 state, coded;

    // Start fetching the old slot into `slot`; `begin` follows once it is there. Returns the shift of span `lane`.
    __device__ __forceinline__ u32 fetch(const Args& a, u32* slot, u32 group, u32 lane, u32 steps, u32 capacity) {
        stage_slot((const u8*)slot_in_payload(a, group), slot, capacity, lane);
        state = ((const u32*)(a.payload + a.meta_offset))[group];
        u32 kind = state >> 24;
        coded = kind == STATE_CODED ? steps : kind & STATE_SPILLED ? min(kind & 0x7fu, steps) : 0u;
        if (capacity < 64) coded = 0;
        return a.payload[a.lane_offset + (u64)group * 32 + lane];
    }
    __device__ __forceinline__ void begin(const u32* tables, const u32* slot, u32 capacity, u32 lane) {
        pairs = tables;
        singles = tables + PAIRS_WORDS;
        if (coded) decoder.init(slot, capacity, lane);
    }

    // Exponents of the lane's eight values of two steps of any kind, at bits 7..14 and 23..30: coded, constant, or
    // spilled from some step on.
    __device__ __forceinline__ void any_span(const Args& a, u32 step, u32 steps, u32 lane, u32 shift, u32 (&x)[4]) {
        u32 bytes[2] = {(state & 255u) * 0x01010101u, (state & 255u) * 0x01010101u};
        if (state >> 24 != STATE_CONSTANT && coded < step + steps) {
            const u8* chunk = chunk_data(a.arena, state & REF_MASK) + step * 128 + lane * 4;
#pragma unroll
            for (u32 odd = 0; odd < 2; odd++)
                bytes[odd] = step + odd >= coded && odd < steps ? *(const u32*)(chunk + odd * 128) : 0u;
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            x[2 * odd] = __byte_perm(bytes[odd], 0, 0x4140) << 7;
            x[2 * odd + 1] = __byte_perm(bytes[odd], 0, 0x4342) << 7;
        }
        if (step < coded) {
            decoder.ask();
            decoder.slow_steps(singles, 0, min(coded - step, 2u), shift, x);
        }
    }
};

// A warp's group of every tensor.
struct GroupStep {
    OldGroup old[TENSORS];
    GroupCoder coder[TENSORS];
    u8* plane[TENSORS];  // of the group: the same in all lanes, so that addresses take few registers
    const u8* grad;
#if DENSE_UPDATE
    u8* dense;  // the update's
#endif

    // Values of two steps: join, update, store sign-fraction bytes. Exponents in `x` are replaced by the new ones, `g` by
    // what the update leaves of the gradient.
    template <class Store>
    __device__ __forceinline__ void update(const Update& change, const u32 (&sf)[TENSORS][2], uint2 (&g)[2],
                                           u32 (&x)[TENSORS][4], const Store& store) {
        u32 values[TENSORS][4];
#pragma unroll
        for (int t = 0; t < TENSORS; t++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint2 v = join4(sf[t][k], x[t][2 * k], x[t][2 * k + 1]);
                values[t][2 * k] = v.x, values[t][2 * k + 1] = v.y;
            }
        u32 gradient[4] = {g[0].x, g[0].y, g[1].x, g[1].y};
        change(values, gradient);
        g[0] = make_uint2(gradient[0], gradient[1]), g[1] = make_uint2(gradient[2], gradient[3]);
#pragma unroll
        for (int t = 0; t < TENSORS; t++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint2 v = make_uint2(values[t][2 * k], values[t][2 * k + 1]);
                store(t, k, v);
                x[t][2 * k] = v.x & EXPONENTS, x[t][2 * k + 1] = v.y & EXPONENTS;
            }
    }

    // All of a full group whose old values are coded throughout. The tensors' streams are decoded, and later coded,
    // side by side: each is a chain of look-ups that wait for one another.
    __device__ __forceinline__ void coded_steps(const Update& change, u32 lane) {
#pragma unroll 1
        for (u32 step = 0; step < STEPS; step += 2) {
            const u32 at = step * 128 + lane * 4;
            if (prefetch_is_due(step)) prefetch_piece(step + PREFETCH_STEPS, lane);
            // On their way from L2 while the streams are decoded.
            u32 sf[TENSORS][2], x[TENSORS][4], e[TENSORS][4], next[TENSORS];
            uint2 g[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
#pragma unroll
                for (int t = 0; t < TENSORS; t++)
                    sf[t][k] = *(const u32*)(plane[t] + at + k * 128);
                g[k] = *(const uint2*)(grad + 2 * at + k * 256);
            }
            bool rare = false;
#pragma unroll
            for (int t = 0; t < TENSORS; t++)
                rare |= old[t].decoder.look(old[t].pairs, e[t], next[t]);
            rare = __any_sync(FULL_WARP, rare);
#pragma unroll
            for (int t = 0; t < TENSORS; t++) {
                u32 shift = __shfl_sync(FULL_WARP, coder[t].my_shift, step / 2);
                old[t].decoder.take(old[t].singles, e[t], next[t], rare, shift, x[t]);
            }
            update(change, sf, g, x,
                   [&](int t, int k, uint2& v) { *(u32*)(plane[t] + at + k * 128) = sign_fractions4(v); });
#if DENSE_UPDATE
#pragma unroll
            for (int k = 0; k < 2; k++)
                *(uint2*)(dense + 2 * at + k * 256) = g[k];
#endif
            GroupCoder::Plan plans[TENSORS];
            rare = false;
#pragma unroll
            for (int t = 0; t < TENSORS; t++)
                rare |= coder[t].plan(make_uint2(x[t][0], x[t][1]), make_uint2(x[t][2], x[t][3]), plans[t]);
            rare = __any_sync(FULL_WARP, rare);
            auto code_rare = [&](int t) {
                coder[t].code_rare(step, make_uint2(x[t][0], x[t][1]), make_uint2(x[t][2], x[t][3]), plans[t]);
            };
#if TENSORS < 3
            // One branch for all, so that their chains stand side by side; for three there are not enough registers.
            if (UNLIKELY(rare)) {
#pragma unroll
                for (int t = 0; t < TENSORS; t++)
                    code_rare(t);
            } else {
#pragma unroll
                for (int t = 0; t < TENSORS; t++)
                    coder[t].code(step, plans[t]);
            }
#else
#pragma unroll
            for (int t = 0; t < TENSORS; t++) {
                if (UNLIKELY(rare))
                    code_rare(t);
                else
                    coder[t].code(step, plans[t]);
            }
#endif
        }
    }

    // Bring into L2 what is read from step `from` on.
    __device__ __forceinline__ void prefetch_piece(u32 from, u32 lane) const {
#pragma unroll
        for (int t = 0; t < TENSORS; t++)
            prefetch(plane[t] + from * 128, PREFETCH_STEPS * 128, lane);
        prefetch(grad + from * 256, PREFETCH_STEPS * 256, lane);
    }

    // A group of any kind, `steps` long; `start`: the lane's first value.
    __device__ __forceinline__ void any_steps(const StepArgs& s, const Update& change, u64 start, u32 steps, u32 lane) {
        const u64 n = s.tensors[0].num_values;
#pragma unroll 1
        for (u32 step = 0; step < steps; step += 2) {
            const u32 count = min(2u, steps - step);
            u32 sf[TENSORS][2], x[TENSORS][4];
            uint2 g[2], keep[2];
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const u64 i = start + (step + k) * 128;
                const bool inside = k < count && i < n;
                const u64 mask = !inside ? 0 : i + 4 <= n ? ~0ull : (1ull << (16 * (n - i))) - 1;
                keep[k] = make_uint2((u32)mask, (u32)(mask >> 32));
#pragma unroll
                for (int t = 0; t < TENSORS; t++)
                    sf[t][k] = inside ? *(const u32*)(plane[t] + (step + k) * 128 + lane * 4) : 0u;
                uint4 v = inside ? load_dense_guarded(s.grad, i, n) : make_uint4(0, 0, 0, 0);
                g[k] = make_uint2(v.x, v.y);
            }
#pragma unroll
            for (int t = 0; t < TENSORS; t++)
                old[t].any_span(s.tensors[t], step, count, lane, __shfl_sync(FULL_WARP, coder[t].my_shift, step / 2),
                                x[t]);
            // Past the end stays +0, whatever the update makes of it.
            update(change, sf, g, x, [&](int t, int k, uint2& v) {
                v = make_uint2(v.x & keep[k].x, v.y & keep[k].y);
                if (keep[k].x) *(u32*)(plane[t] + (step + k) * 128 + lane * 4) = sign_fractions4(v);
            });
#if DENSE_UPDATE
#pragma unroll
            for (u32 k = 0; k < 2; k++)
                if (k < count)
                    store_dense_guarded(s.update, start + (step + k) * 128, n, make_uint4(g[k].x, g[k].y, 0, 0));
#endif
#pragma unroll
            for (int t = 0; t < TENSORS; t++)
                coder[t].any_span(step, make_uint2(x[t][0], x[t][1]), make_uint2(x[t][2], x[t][3]), count);
        }
    }
};

// Mirrors steps._list_type: what one launch steps; blocks first_block[k] to first_block[k + 1] - 1 take tensor k.
struct StepList {
    u32 first_block[MOST_STEPS + 1];
    StepArgs steps[MOST_STEPS];
};

__device__ __forceinline__ void run_step(const StepList& list) {
    extern __shared__ uint4 shared[];
    u32 number = 0;
    while (blockIdx.x >= list.first_block[number + 1])
        number++;
    const StepArgs& s = list.steps[number];
    const u32 block = blockIdx.x - list.first_block[number];
#if !DENSE_UPDATE
    if (s.found_inf && *s.found_inf == 1.0f) return;
#endif
    u32* tables = (u32*)shared;
    const Args& all = s.tensors[0];  // what is the same for every tensor
    const u32 warp = warp_number(), lane = threadIdx.x % 32, group = all.first_group + block * warps() + warp;
    const bool active = group < all.end_group, tail = group >= all.full_groups;
    const u32 steps = tail ? all.tail_steps : STEPS;
    const u64 start = quad_index(group, 0, lane);
    GroupStep g;
    EncodeTables encode[TENSORS];
    u32 old_shifts[TENSORS], *slots[TENSORS], *next_slots = tables + TENSORS * STEP_TABLE_WORDS;
    // All that does not wait for the books comes before them.
#pragma unroll
    for (int t = 0; t < TENSORS; t++) {
        const Args& a = s.tensors[t];
        slots[t] = next_slots + warp * a.capacity;
        next_slots += warps() * a.capacity;
        g.plane[t] = a.payload + a.sign_fraction_offset + (u64)group * GROUP_VALUES;
        if (active)
            old_shifts[t] = g.old[t].fetch(a, slots[t], group, lane, steps, tail ? a.tail_capacity : a.capacity);
    }
    g.grad = (const u8*)s.grad + (u64)group * (2 * GROUP_VALUES);
#if DENSE_UPDATE
    g.dense = (u8*)s.update + (u64)group * (2 * GROUP_VALUES);
#endif
    if (active && !tail) g.prefetch_piece(0, lane);
    __shared__ bool admitted;
#if RARE_IN_SHARED
    __shared__ RareState rare[WARPS][TENSORS];
#endif
    reserve_for_block(all, block, TENSORS, admitted);
#pragma unroll
    for (int t = 0; t < TENSORS; t++) {
        u32* own = tables + t * STEP_TABLE_WORDS;
        const u32* book = book_tables(s.tensors[t]);
        stage_table(own, book + TABLE_PAIRS, PAIRS_WORDS);
        stage_table(own + PAIRS_WORDS, book + TABLE_SINGLES, SINGLES_WORDS);
        encode[t] = stage_encode_tables(own + PAIRS_WORDS + SINGLES_WORDS, book);
    }
    stage_wait();
    __syncthreads();
    if (!active || !admitted) return;

    bool coded = !tail;
#pragma unroll
    for (int t = 0; t < TENSORS; t++) {
        const Args& a = s.tensors[t];
        const u32 capacity = tail ? a.tail_capacity : a.capacity;
        g.old[t].begin(tables + t * STEP_TABLE_WORDS, slots[t], capacity, lane);
#if RARE_IN_SHARED
        g.coder[t].rare = &rare[warp][t];
#endif
        g.coder[t].init(a, encode[t], (u32*)(a.payload + slot_offset(a, group)), held_chunk(a, group), 1, group, lane,
                        old_shifts[t]);
        coded = coded && g.old[t].coded == STEPS;
    }
    __syncwarp();

    const Update change(s);
    if (coded)
        g.coded_steps(change, lane);
    else
        g.any_steps(s, change, start, steps, lane);
#pragma unroll
    for (int t = 0; t < TENSORS; t++)
        g.coder[t].commit(g.coder[t].close());
}
