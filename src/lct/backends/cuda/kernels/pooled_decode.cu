// Decode pooled streams into a dense tensor (docs/format.md, sections 6 and 8).
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l decodes quad l of each step.
// Shared memory (dynamic): decoding table (256 words), then one slot a warp, fetched with cp.async.

#define CHUNK_STEPS 8

// Steps [from, steps) one at a time: the end of a group that spilled, constant and wide groups, tails.
__device__ __forceinline__ void decode_rest(const Args& a, PooledDecoder<false> decoder, const u32* table, u32 my_shift,
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
    for (u32 step = from; step < steps; step++) {
        u64 i = quad_index(group, step, lane);
        u32 sf = i < a.num_values ? *(const u32*)(sign_fractions + i) : 0u;
        u32 shift = __shfl_sync(FULL_WARP, my_shift, step / 2), at = step * 128 + lane * 4;
        Quad q;
        if (step < coded) {
            u32 e[4], offset = shift_offset(shift);
            decoder.quad(table, e, a, group);
            if (any_special(e, e)) decoder.resolve(e, offset);
            q.words = join_entries(sf, e, offset);
        } else {
            q.words = join_bytes4(sf, chunk ? *(const u32*)(chunk + at) : (state & 255u) * 0x01010101u);
        }
        q.low = wide ? *(const uint2*)((step < 32 ? lower : upper) + at % 4096 * 2) : load_low(low, i, a.num_values);
        store_dense_guarded(a.dense, i, a.num_values, merge_quad(q));
    }
}

extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void pooled_decode(const __grid_constant__ Args a) {
    extern __shared__ uint4 shared[];
    u32* table = (u32*)shared;
    const u32* book = book_tables(a);
    for (u32 i = threadIdx.x; i < 256; i += WARPS * 32)
        table[i] = book[TABLE_DECODE + i];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.first_group + blockIdx.x * WARPS + warp;
    bool active = group < a.end_group, tail = group >= a.full_groups;
    u32 capacity = tail ? a.tail_capacity : a.capacity, steps = tail ? a.tail_steps : STEPS;
    u32* slot = table + 256 + warp * a.capacity;
    u32 state = 0, coded = 0, my_shift = 0;
    if (active) {
        state = ((const u32*)(a.payload + a.meta_offset))[group];
        u32 kind = state >> 24;
        coded = kind == STATE_CODED ? steps : kind & STATE_SPILLED ? min(kind & 0x7fu, steps) : 0u;
        if (capacity < 64) coded = 0;
        my_shift = a.payload[a.lane_offset + (u64)group * 32 + lane];
        if (coded) stage_slot(a.payload + slot_offset(a, group), slot, capacity, lane);
    }
    stage_wait();
    __syncthreads();
    if (!active) return;

    PooledDecoder<false> decoder;
    if (coded) decoder.init(slot, capacity, lane);
    const u8* sign_fractions = a.payload + a.sign_fraction_offset;
    const u8* low = a.payload + a.low_offset;
    u32 step0 = 0;
    if (!tail) {
#pragma unroll 1
        for (; step0 + CHUNK_STEPS <= coded; step0 += CHUNK_STEPS) {
            u32 sf[CHUNK_STEPS];
            u64 first = quad_index(group, step0, lane);
#pragma unroll
            for (int k = 0; k < CHUNK_STEPS; k++)
                sf[k] = __ldcs((const u32*)(sign_fractions + first + k * 128));
#pragma unroll
            for (int k = 0; k < CHUNK_STEPS; k += 2) {
                u32 offset = shift_offset(__shfl_sync(FULL_WARP, my_shift, (step0 + k) / 2)), e[2][4];
                decoder.quad(table, e[0], a, group);
                decoder.quad(table, e[1], a, group);
                if (UNLIKELY(any_special(e[0], e[1]))) {
                    decoder.resolve(e[0], offset);
                    decoder.resolve(e[1], offset);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u64 at = first + (k + i) * 128;
                    Quad q;
                    q.words = join_entries(sf[k + i], e[i], offset);
                    q.low = load_low(low, at, a.num_values);
                    store_dense(a.dense, at, merge_quad(q));
                }
            }
        }
    }
    if (step0 < steps) decode_rest(a, decoder, table, my_shift, group, lane, step0, coded, steps, state);
}
