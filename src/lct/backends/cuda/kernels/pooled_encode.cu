// Encode a dense tensor into pooled streams (docs/format.md, sections 5, 6 and 8).
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l codes quad l of each step.
// Shared memory (dynamic): pair table (256 words), single table (512 words), then one slot a warp.
// Every value of a group is read once; sign-fraction bytes leave at once, the slot at the end.

#define CHUNK_STEPS 8

template <bool TAIL>
__device__ __forceinline__ void encode_group(const Args& a, const EncodeTables& tables, u32* slot, u32 group, u32 lane) {
    const u32 steps = TAIL ? a.tail_steps : STEPS, capacity = TAIL ? a.tail_capacity : a.capacity;
    u8* slot_out = a.payload + (TAIL ? a.tail_slot_offset : 16 + (u64)group * a.capacity * 4);
    u32* meta = (u32*)(a.payload + a.meta_offset) + group;
    u32 old = a.fresh ? 0 : *meta;
    u32 old_chunk = (old >> 24) & STATE_SPILLED ? old & REF_MASK : NO_CHUNK;
    SpillChunk spill;
    const int worst = DTYPE == 4 ? 3 : 1;
    int credits = a.reserve && old_chunk == NO_CHUNK ? worst : 0;
    if (credits) {
        bool held = lane == 0 ? reserve_chunks(a.arena, credits) : true;
        if (!__all_sync(FULL_WARP, held)) {
            if (lane == 0) atomicAdd(&a.arena->failed_groups, 1u);
            return;
        }
    }
    spill.init(a.arena, old_chunk, a.reserve, credits);

    u8* sign_fractions = a.payload + a.sign_fraction_offset;
    u8* low = a.payload + a.low_offset;
    clear_slot(slot, capacity, lane);
    __syncwarp();
    PooledEncoder encoder;
    encoder.init(slot, capacity, lane);
    u32 coded = capacity < 64 ? 0 : steps, my_shift = 0, first = 0, low_bits = 0;
    bool constant = true;

#pragma unroll 1
    for (u32 step0 = 0; step0 < steps; step0 += CHUNK_STEPS) {
        uint2 v[CHUNK_STEPS];
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++) {
            u64 i = quad_index(group, step0 + k, lane);
            uint4 dense = TAIL ? (step0 + k < steps ? load_dense_guarded(a.dense, i, a.num_values) : make_uint4(0, 0, 0, 0))
                               : load_dense(a.dense, i);
            Quad q = split_quad(dense);
            v[k] = q.words;
            if (!TAIL || i < a.num_values) __stcs((u32*)(sign_fractions + i), sign_fractions4(q.words));
            if (DTYPE == 4) low_bits |= q.low.x | q.low.y;
            else store_low(low, i, a.num_values, q.low);
        }
        if (step0 == 0) first = __shfl_sync(FULL_WARP, (exponents2(v[0].x) & 0xffffu) * 0x00010001u, 0);
        if (constant) {
            u32 other = 0;
#pragma unroll
            for (int k = 0; k < CHUNK_STEPS; k++)
                if (!TAIL || step0 + k < steps) other |= (exponents2(v[k].x) ^ first) | (exponents2(v[k].y) ^ first);
            constant = !__any_sync(FULL_WARP, other);
        }
        u32 smallest = 0xffffffffu;
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++) smallest = min_halves(smallest, min_halves(exponents2(v[k].x), exponents2(v[k].y)));
        bool zeros = __any_sync(FULL_WARP, has_zero_half(smallest));
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k += 2) {
            u32 shift = zeros ? span_shift_zeros(v[k], v[k + 1]) : span_shift(v[k], v[k + 1]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 step = step0 + k + i;
                if (step < coded) {
                    if (encoder.quad(tables, v[k + i], shift, zeros)) {
                        if (lane == step / 2) my_shift = shift;
                    } else {
                        coded = step;
                    }
                }
                if (step >= coded && step < steps)
                    *(u32*)(spill.data(group, lane) + step * 128 + lane * 4) = exponent_bytes4(v[k + i]);
            }
        }
    }

    u32 state = coded < steps ? (STATE_SPILLED | coded) << 24 | spill.chunk : 0u;
    if (DTYPE == 4 && __any_sync(FULL_WARP, low_bits)) {
        // The promise that lower halves are zero does not hold: read the group again and store it wide.
        u8* parts[3];
        u32 refs[3];
        parts[0] = spill.data(group, lane);
        refs[0] = spill.chunk;
        for (int c = 1; c < 3; c++) {
            refs[c] = spill.take(group, lane);
            parts[c] = chunk_data(a.arena, refs[c]);
        }
        for (u32 step = 0; step < steps; step++) {
            u64 i = quad_index(group, step, lane);
            Quad q = split_quad(TAIL ? load_dense_guarded(a.dense, i, a.num_values) : load_dense(a.dense, i));
            u32 at = step * 128 + lane * 4;
            *(u32*)(parts[0] + at) = exponent_bytes4(q.words);
            *(uint2*)(parts[1 + at / 4096] + at % 4096 * 2) = q.low;
        }
        __syncwarp();
        clear_slot(slot, capacity, lane);
        __syncwarp();
        if (lane < 2) slot[lane] = lane ? refs[2] : refs[1];
        state = STATE_WIDE << 24 | refs[0];
        my_shift = 0;
    } else if (constant) {
        __syncwarp();
        clear_slot(slot, capacity, lane);
        state = STATE_CONSTANT << 24 | (first & 255u);
        my_shift = 0;
    } else {
        encoder.finish();
    }
    __syncwarp();
    store_slot(slot_out, slot, capacity, lane);
    a.payload[a.lane_offset + (u64)group * 32 + lane] = (u8)my_shift;
    if (lane == 0) *meta = state;
    spill.finish((state >> 24) & STATE_SPILLED || state >> 24 == STATE_WIDE, lane);
}

extern "C" __global__ __launch_bounds__(WARPS * 32) void pooled_encode(const __grid_constant__ Args a) {
    extern __shared__ uint4 shared[];
    u32* pair = (u32*)shared;
    const u32* book = book_tables(a);
    for (u32 i = threadIdx.x; i < 256; i += WARPS * 32) pair[i] = book[TABLE_PAIR + i];
    for (u32 i = threadIdx.x; i < 512; i += WARPS * 32) pair[256 + i] = book[TABLE_ENCODE + i];
    EncodeTables tables = {pair, pair + 256, book[TABLE_WINDOW]};
    __syncthreads();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.first_group + blockIdx.x * WARPS + warp;
    if (group >= a.end_group) return;
    if (group == 0) {
        clear_gaps(a, lane);
        if (lane < 4 && a.book != NO_CHUNK) ((u32*)a.payload)[lane] = a.header[lane];
    }
    u32* slot = pair + 768 + warp * a.capacity;
    if (group < a.full_groups) encode_group<false>(a, tables, slot, group, lane);
    else encode_group<true>(a, tables, slot, group, lane);
}
