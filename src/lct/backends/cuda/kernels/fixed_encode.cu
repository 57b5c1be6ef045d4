// Encode a dense tensor into fixed streams: CLEAN, MEDIUM, HIGH (docs/format.md, sections 3, 7 and 8).
//
// Thread mapping: one block of threads a block of 256 streams (8 warps), one warp a group of 32 streams.
// Shared memory (dynamic): pair table (256 words), single table (512 words), then one slot a warp.

#define CHUNK_STEPS 8

template <bool TAIL>
__device__ __forceinline__ void encode_group(const Args& a, const u32* pair, u32 window, u32 shift, u32* slot, u32 group,
                                             u32 lane) {
    const u32 steps = TAIL ? a.tail_steps : STEPS, capacity = TAIL ? a.tail_capacity : a.capacity;
    u8* slot_out = a.payload + (TAIL ? a.tail_slot_offset + (u64)(group - a.full_groups) * capacity * 128
                                     : 16 + (u64)group * capacity * 128);
    u32* meta = (u32*)(a.payload + a.meta_offset) + group;
    u32 old = a.fresh ? 0 : *meta;
    u32 old_chunk = (old >> 24) & STATE_SPILLED ? old & REF_MASK : NO_CHUNK;
    int credits = a.reserve && old_chunk == NO_CHUNK ? 1 : 0;
    if (credits) {
        bool held = lane == 0 ? reserve_chunks(a.arena, credits) : true;
        if (!__all_sync(FULL_WARP, held)) {
            if (lane == 0) atomicAdd(&a.arena->failed_groups, 1u);
            return;
        }
    }
    SpillChunk spill;
    spill.init(a.arena, old_chunk, a.reserve, credits);

    u8* sign_fractions = a.payload + a.sign_fraction_offset;
    u8* low = a.payload + a.low_offset;
    clear_slot(slot, capacity * 32, lane);
    __syncwarp();
    FixedEncoder encoder;
    encoder.init(slot, capacity, lane);
    u32 coded = steps, first = 0;
    bool constant = true;
#pragma unroll 1
    for (u32 step0 = 0; step0 < steps; step0 += CHUNK_STEPS) {
        uint2 v[CHUNK_STEPS];
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++) {
            u64 i = quad_index(group, step0 + k, lane);
            bool inside = !TAIL || (step0 + k < steps && i < a.num_values);
            uint4 dense = TAIL ? (inside ? load_dense_guarded(a.dense, i, a.num_values) : make_uint4(0, 0, 0, 0))
                               : load_dense(a.dense, i);
            Quad q = split_quad(dense);
            v[k] = q.words;
            if (inside) __stcs((u32*)(sign_fractions + i), sign_fractions4(q.words));
            store_low(low, inside ? i : a.num_values + (i & 4), a.num_values, q.low);
        }
        if (step0 == 0) first = __shfl_sync(FULL_WARP, (exponents2(v[0].x) & 0xffffu) * 0x00010001u, 0);
        if (constant) {
            u32 other = 0;
#pragma unroll
            for (int k = 0; k < CHUNK_STEPS; k++)
                if (!TAIL || step0 + k < steps) other |= (exponents2(v[k].x) ^ first) | (exponents2(v[k].y) ^ first);
            constant = !__any_sync(FULL_WARP, other);
        }
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++) {
            u32 step = step0 + k;
            if (step < coded && !encoder.quad(pair, pair + 256, window, v[k], shift)) coded = step;
            if (__any_sync(FULL_WARP, step >= coded && step < steps)) {
                u8* data = spill.data(group, lane);
                if (step >= coded && step < steps) *(u32*)(data + step * 128 + lane * 4) = exponent_bytes4(v[k]);
            }
        }
    }
    u32 state = spill.chunk != NO_CHUNK && __any_sync(FULL_WARP, coded < steps) ? STATE_SPILLED << 24 | spill.chunk : 0u;
    if (constant) {
        __syncwarp();
        clear_slot(slot, capacity * 32, lane);
        state = STATE_CONSTANT << 24 | (first & 255u);
        coded = 0;
    } else {
        encoder.finish();
    }
    __syncwarp();
    store_slot(slot_out, slot, capacity * 32, lane);
    a.payload[a.lane_offset + (u64)group * 32 + lane] = (u8)coded;
    if (lane == 0) *meta = state;
    spill.finish((state >> 24) & STATE_SPILLED, lane);
}

extern "C" __global__ __launch_bounds__(WARPS * 32) void fixed_encode(const __grid_constant__ Args a) {
    extern __shared__ uint4 shared[];
    u32* pair = (u32*)shared;
    const u32* book = book_tables(a);
    for (u32 i = threadIdx.x; i < 256; i += WARPS * 32) pair[i] = book[TABLE_PAIR + i];
    for (u32 i = threadIdx.x; i < 512; i += WARPS * 32) pair[256 + i] = book[TABLE_ENCODE + i];
    u32 window = book[TABLE_WINDOW], shift = a.book == NO_CHUNK ? a.payload[4] : a.header[1] & 255u;
    __syncthreads();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.first_group + blockIdx.x * WARPS + warp;
    if (group >= a.end_group) return;
    if (group == 0) {
        clear_gaps(a, lane);
        if (lane < 4 && a.book != NO_CHUNK) ((u32*)a.payload)[lane] = a.header[lane];
    }
    u32* slot = pair + 768 + warp * a.capacity * 32;
    if (group < a.full_groups) encode_group<false>(a, pair, window, shift, slot, group, lane);
    else encode_group<true>(a, pair, window, shift, slot, group, lane);
}
