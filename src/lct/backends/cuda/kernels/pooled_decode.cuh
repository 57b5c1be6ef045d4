// What one block does to decode pooled streams into a dense tensor (docs/format.md, sections 6 and 8).
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l decodes quad l of each step.
// Shared memory (dynamic): tables of pairs and singles, then one slot a warp, fetched with cp.async.

// Steps whose sign-fraction bytes are loaded together.
#define CHUNK_STEPS 8

// Steps [from, steps) one at a time: the end of a group that spilled, constant and wide groups, tails.
__device__ __forceinline__ void decode_rest(const Args& a, PooledDecoder decoder, const u32* singles, u32 my_shift,
                                            u32 group, u32 lane, u32 from, u32 coded, u32 steps, u32 state) {
    const u8* sign_fractions = a.payload + a.sign_fraction_offset;
    const u8* low = a.payload + a.low_offset;
    const u8* chunk = nullptr;
    const u8 *lower = nullptr, *upper = nullptr;  // lower halves of steps 0..31 and 32..63
    bool wide = state >> 24 == STATE_WIDE;
    if ((state >> 24) & STATE_SPILLED || wide) chunk = chunk_data(a.arena, state & REF_MASK);
    if (wide) {
        const u32* refs = (const u32*)(a.payload + slot_offset(a, group));
        lower = chunk_data(a.arena, refs[0]);
        upper = chunk_data(a.arena, refs[1]);
    }
#pragma unroll 1
    for (u32 step = from; step < steps; step++) {
        u64 i = quad_index(group, step, lane);
        u32 sf = i < a.num_values ? *(const u32*)(sign_fractions + i) : 0u;
        u32 shift = __shfl_sync(FULL_WARP, my_shift, step / 2), at = step * 128 + lane * 4;
        Quad q;
        if (step < coded) {
            if (!(step & 1)) decoder.ask();
            uint2 e = decoder.slow_step(singles, step & 1, shift);
            q.words = join4(sf, e.x, e.y);
        } else {
            q.words = join_bytes4(sf, chunk ? *(const u32*)(chunk + at) : (state & 255u) * 0x01010101u);
        }
        q.low = wide ? *(const uint2*)((step < 32 ? lower : upper) + at % 4096 * 2) : load_low(low, i, a.num_values);
        store_dense_guarded(a.dense, i, a.num_values, merge_quad(q));
    }
}

// `block`: its number among those of the tensor.
__device__ __forceinline__ void decode_block(const Args& a, u32 block) {
    extern __shared__ uint4 shared[];
    u32* pairs = (u32*)shared;
    u32* singles = pairs + PAIRS_WORDS;
    const u32 warp = warp_number(), lane = threadIdx.x % 32, group = a.first_group + block * warps() + warp;
    const bool active = group < a.end_group, tail = group >= a.full_groups;
    const u32 capacity = tail ? a.tail_capacity : a.capacity, steps = tail ? a.tail_steps : STEPS;
    u32* slot = singles + SINGLES_WORDS + warp * a.capacity;
    const u64 start = quad_index(group, 0, lane);
    const u8* plane = a.payload + a.sign_fraction_offset + start;
    u32 state = 0, my_shift = 0;
    // All that does not wait for the book comes before it.
    if (active) {
        stage_slot(a.payload + slot_offset(a, group), slot, capacity, lane);
        state = ((const u32*)(a.payload + a.meta_offset))[group];
        my_shift = a.payload[a.lane_offset + (u64)group * 32 + lane];
        if (!tail) prefetch_at_once(plane - lane * 4, PREFETCH_STEPS * 128, lane);
    }
    const u32* book = book_tables(a);
    stage_table(pairs, book + TABLE_PAIRS, PAIRS_WORDS);
    stage_table(singles, book + TABLE_SINGLES, SINGLES_WORDS);
    stage_wait();
    __syncthreads();
    if (!active) return;

    const u32 kind = state >> 24;
    u32 coded = kind == STATE_CODED ? steps : kind & STATE_SPILLED ? min(kind & 0x7fu, steps) : 0u;
    if (capacity < 64) coded = 0;
    PooledDecoder decoder;
    if (coded) decoder.init(slot, capacity, lane);
    u32 step0 = 0;
    if (!tail) {
#pragma unroll 1
        for (; step0 + CHUNK_STEPS <= coded; step0 += CHUNK_STEPS) {
            if (prefetch_is_due(step0))
                prefetch_at_once(plane - lane * 4 + (step0 + PREFETCH_STEPS) * 128, PREFETCH_STEPS * 128, lane);
            // On their way while the streams are decoded.
            u32 sf[CHUNK_STEPS];
#pragma unroll
            for (int k = 0; k < CHUNK_STEPS; k++)
                sf[k] = *(const u32*)(plane + (step0 + k) * 128);
#pragma unroll
            for (int k = 0; k < CHUNK_STEPS; k += 2) {
                u32 x[4];
                decoder.span(pairs, singles, __shfl_sync(FULL_WARP, my_shift, (step0 + k) / 2), x);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u64 at = start + (step0 + k + i) * 128;
                    Quad q;
                    q.words = join4(sf[k + i], x[2 * i], x[2 * i + 1]);
                    q.low = load_low(a.payload + a.low_offset, at, a.num_values);
                    store_dense(a.dense, at, merge_quad(q));
                }
            }
        }
    }
    if (step0 < steps) decode_rest(a, decoder, singles, my_shift, group, lane, step0, coded, steps, state);
}
