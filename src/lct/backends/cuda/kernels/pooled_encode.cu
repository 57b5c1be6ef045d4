// Encode a dense tensor into pooled streams (docs/format.md, sections 5, 6 and 8).
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l codes quad l of each step.
// Shared memory (dynamic): pair table (PAIR_WORDS), then a stage and a slot a warp. Every value of a group
// is read once; sign-fraction bytes leave at once, the slot at the end.

// Steps whose loads are in flight together.
#define CHUNK_STEPS (VALUE_BYTES == 4 ? 4 : 8)

// Steps [0, steps) near the end of the tensor; returns the OR of the low bits.
__device__ __forceinline__ u32 guarded_steps(const Args& a, GroupCoder& g, u32 steps) {
    u32 low_bits = 0;
#pragma unroll 1
    for (u32 step0 = 0; step0 < steps; step0 += STAGE_STEPS) {
#pragma unroll 1
        for (u32 k = 0; k < STAGE_STEPS; k++) {
            u64 i = quad_index(g.group, step0 + k, g.lane);
            bool inside = step0 + k < steps && i < a.num_values;
            Quad q = split_quad(inside ? load_dense_guarded(a.dense, i, a.num_values) : make_uint4(0, 0, 0, 0));
            g.stage[k * 32] = exponents4(q.words);
            if (inside) *(u32*)(a.payload + a.sign_fraction_offset + i) = sign_fractions4(q.words);
            low_bits |= q.low.x | q.low.y;
            store_low(a.payload + a.low_offset, i, a.num_values, q.low);
        }
        g.staged_steps(step0, min(step0 + STAGE_STEPS, steps));
    }
    return low_bits;
}

// A chunk of a full group; returns the OR of the low bits. All loads come before the first store: the
// compiler may not move a load over a store to memory that could be the same (1.6 times the time on an H200).
__device__ __forceinline__ u32 full_chunk(const Args& a, GroupCoder& g, u32 step0) {
    uint4 dense[CHUNK_STEPS];
    u64 start = quad_index(g.group, step0, g.lane);
    u32 low_bits = 0;
#pragma unroll
    for (int k = 0; k < CHUNK_STEPS; k++)
        dense[k] = load_dense(a.dense, start + k * 128);
    uint2 e4[CHUNK_STEPS];
#pragma unroll
    for (int k = 0; k < CHUNK_STEPS; k++) {
        u64 i = start + k * 128;
        Quad q = split_quad(dense[k]);
        e4[k] = exponents4(q.words);
        __stcs((u32*)(a.payload + a.sign_fraction_offset + i), sign_fractions4(q.words));
        low_bits |= q.low.x | q.low.y;
        store_low(a.payload + a.low_offset, i, a.num_values, q.low);
    }
#pragma unroll
    for (int k = 0; k < CHUNK_STEPS; k += STAGE_STEPS)
        g.four_steps(step0 + k, e4 + k);
    return low_bits;
}

// Lower halves are not zero although the payload has no room for them: read the group again and store it
// wide. Returns the state.
__device__ __forceinline__ u32 store_wide(const Args& a, GroupCoder& g, u32 steps) {
    u8* exponents = g.spill.data(g.group, g.lane);
    u32 lower_ref = g.spill.take(g.group, g.lane), upper_ref = g.spill.take(g.group, g.lane);
    u8 *lower = chunk_data(a.arena, lower_ref), *upper = chunk_data(a.arena, upper_ref);
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        u64 i = quad_index(g.group, step, g.lane);
        Quad q = split_quad(load_dense_guarded(a.dense, i, a.num_values));
        u32 at = step * 128 + g.lane * 4;
        *(u32*)(exponents + at) = exponent_bytes(exponents4(q.words));
        *(uint2*)((step < 32 ? lower : upper) + at % 4096 * 2) = q.low;
    }
    __syncwarp();
    clear_slot(g.encoder.slot, g.encoder.capacity, g.lane);
    __syncwarp();
    if (g.lane < 2) g.encoder.slot[g.lane] = g.lane ? upper_ref : lower_ref;
    g.my_shift = 0;
    return STATE_WIDE << 24 | g.spill.chunk;
}

extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void pooled_encode(const __grid_constant__ Args a) {
    extern __shared__ uint4 shared[];
    u32* pair = (u32*)shared;
    const u32* book = book_tables(a);
    for (u32 i = threadIdx.x; i < PAIR_WORDS; i += WARPS * 32)
        pair[i] = book[TABLE_PAIR + i];
    const EncodeTables tables = {pair, book + TABLE_ENCODE, book[TABLE_WINDOW]};
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.first_group + blockIdx.x * WARPS + warp;
    if (group >= a.end_group) return;
    if (group == 0) begin_payload(a, lane);
    const bool tail = group >= a.full_groups;
    const u32 capacity = tail ? a.tail_capacity : a.capacity;
    const u32 old_chunk = a.fresh ? NO_CHUNK : held_chunk(a, group);
    const int credits = a.reserve && old_chunk == NO_CHUNK ? (DTYPE == 4 ? 3 : 1) : 0;
    if (!reserve_for_warp(a.arena, credits, lane)) return;

    uint2* stage = (uint2*)(pair + PAIR_WORDS) + warp * (STAGE_STEPS * 32) + lane;
    u32* slot = pair + PAIR_WORDS + WARPS * STAGE_STEPS * 64 + warp * a.capacity;
    GroupCoder g;
    g.init(tables, slot, capacity, stage, group, lane);
    g.spill.init(a, old_chunk, credits);
    u32 low_bits = 0;
    if (tail) {
        low_bits = guarded_steps(a, g, a.tail_steps);
    } else {
#pragma unroll 1
        for (u32 step0 = 0; step0 < STEPS; step0 += CHUNK_STEPS)
            low_bits |= full_chunk(a, g, step0);
    }
    bool wide = DTYPE == 4 && __any_sync(FULL_WARP, low_bits);
    g.commit(a, wide ? store_wide(a, g, tail ? a.tail_steps : STEPS) : g.close());
}
