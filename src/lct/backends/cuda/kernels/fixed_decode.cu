// Decode fixed streams: CLEAN, MEDIUM, HIGH (docs/format.md, sections 3, 7 and 8).
//
// Thread mapping: one block of threads a block of 256 streams (8 warps), one warp a group of 32 streams.
// Shared memory (dynamic): the table of singles, then one slot a warp, fetched with cp.async.

#define CHUNK_STEPS 8

// Steps [from, steps) with guards: groups that spilled somewhere, constant groups, tails.
__device__ __forceinline__ void decode_rest(const Args& a, FixedDecoder decoder, const u32* singles, u32 shift,
                                            u32 group, u32 lane, u32 from, u32 coded, u32 steps, u32 state) {
    const u8* sign_fractions = a.payload + a.sign_fraction_offset;
    const u8* low = a.payload + a.low_offset;
    const u8* chunk = (state >> 24) & STATE_SPILLED ? chunk_data(a.arena, state & REF_MASK) : nullptr;
    for (u32 step = from; step < steps; step++) {
        u64 i = quad_index(group, step, lane);
        u32 sf = i < a.num_values ? *(const u32*)(sign_fractions + i) : 0u;
        Quad q;
        if (step < coded) {
            uint2 e = decoder.quad(singles, shift);
            q.words = join4(sf, e.x, e.y);
        } else {
            q.words =
                join_bytes4(sf, chunk ? *(const u32*)(chunk + step * 128 + lane * 4) : (state & 255u) * 0x01010101u);
        }
        q.low = load_low(low, i, a.num_values);
        store_dense_guarded(a.dense, i, a.num_values, merge_quad(q));
    }
}

extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void fixed_decode(const __grid_constant__ Args a) {
    extern __shared__ uint4 shared[];
    u32* singles = (u32*)shared;
    const u32* book = book_tables(a);
    stage_table(singles, book + TABLE_SINGLES, SINGLES_WORDS);
    u32 warp = warp_number(), lane = threadIdx.x % 32, group = a.first_group + blockIdx.x * WARPS + warp;
    bool active = group < a.end_group, tail = group >= a.full_groups;
    u32 capacity = tail ? a.tail_capacity : a.capacity, steps = tail ? a.tail_steps : STEPS;
    u32* slot = singles + SINGLES_WORDS + warp * a.capacity * 32;
    u32 state = 0, coded = 0, shift = a.payload[4];
    if (active) {
        state = ((const u32*)(a.payload + a.meta_offset))[group];
        coded = state >> 24 == STATE_CONSTANT ? 0u : min((u32)a.payload[a.lane_offset + (u64)group * 32 + lane], steps);
        stage_slot(a.payload + slot_offset(a, group), slot, capacity * 32, lane);
    }
    stage_wait();
    __syncthreads();
    if (!active) return;

    FixedDecoder decoder;
    decoder.init(slot, capacity, lane);
    if (tail || state) return decode_rest(a, decoder, singles, shift, group, lane, 0, coded, steps, state);
    const u8* sign_fractions = a.payload + a.sign_fraction_offset;
    const u8* low = a.payload + a.low_offset;
#pragma unroll 1
    for (u32 step0 = 0; step0 < STEPS; step0 += CHUNK_STEPS) {
        u32 sf[CHUNK_STEPS];
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++)
            sf[k] = *(const u32*)(sign_fractions + quad_index(group, step0 + k, lane));
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++) {
            u64 i = quad_index(group, step0 + k, lane);
            uint2 e = decoder.quad(singles, shift);
            Quad q;
            q.words = join4(sf[k], e.x, e.y);
            q.low = load_low(low, i, a.num_values);
            store_dense(a.dense, i, merge_quad(q));
        }
    }
}
