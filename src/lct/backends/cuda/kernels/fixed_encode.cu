// Encode a dense tensor into fixed streams: CLEAN, MEDIUM, HIGH (docs/format.md, sections 3, 7 and 8).
//
// Thread mapping: one block of threads a block of 256 streams (8 warps), one warp a group of 32 streams.
// Shared memory (dynamic): pair table (PAIR_WORDS), then a stage (4 quads a lane) and a slot a warp.
// Four steps without zeros, escapes and spills take the fast path.

// Steps whose loads are in flight together.
#define CHUNK_STEPS (VALUE_BYTES == 4 ? 4 : 8)

struct GroupEncoder {
    const Args& a;
    const EncodeTables& tables;
    FixedEncoder encoder;
    SpillChunk spill;
    uint2* stage;  // of this lane; rows of 32
    u32 group, lane, steps, shift, rotate, first, differs;

    // Code the staged quads of steps [from, to), at most STAGE_STEPS, of any kind.
    __device__ __forceinline__ void staged_steps(u32 from, u32 to) {
#pragma unroll 1
        for (u32 step = from; step < to; step++) {
            uint2 e4 = stage[(step - from) * 32];
            if (step == 0) first = __shfl_sync(FULL_WARP, (e4.x & 0xffffu) * 0x00010001u, 0);
            differs |= (e4.x ^ first) | (e4.y ^ first);
            encoder.quad(tables.single, e4, shift);
            if (__any_sync(FULL_WARP, encoder.stopped)) {
                u8* data = spill.data(group, lane);
                if (encoder.stopped) *(u32*)(data + step * 128 + lane * 4) = exponent_bytes(e4);
            }
        }
        differs = __any_sync(FULL_WARP, differs);
    }

    // Steps [from, to) near the end of the tensor.
    __device__ __forceinline__ void guarded_steps(u32 from, u32 to) {
#pragma unroll 1
        for (u32 step = from; step < to; step++) {
            u64 i = quad_index(group, step, lane);
            Quad q = split_quad(load_dense_guarded(a.dense, i, a.num_values));
            stage[0] = exponents4(q.words);
            if (i < a.num_values) *(u32*)(a.payload + a.sign_fraction_offset + i) = sign_fractions4(q.words);
            store_low(a.payload + a.low_offset, i, a.num_values, q.low);
            staged_steps(step, step + 1);
        }
    }

    // Four steps of a full group; exponents times 4.
    __device__ __forceinline__ void four_steps(u32 step0, const uint2* e4) {
        u32 q[2 * STAGE_STEPS], smallest = 0xffffffffu, slow = 0, length = 0;
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k++) {
            u32 rx = e4[k].x + rotate, ry = e4[k].y + rotate;
            q[2 * k] = *(const u32*)((const u8*)tables.pair + pair_offset(rx));
            q[2 * k + 1] = *(const u32*)((const u8*)tables.pair + pair_offset(ry));
            slow |= ((rx | ry) & OUTSIDE_WINDOW) | ((q[2 * k] | q[2 * k + 1]) & SLOW);
            smallest = min3_halves(smallest, e4[k].x, e4[k].y);
            length += q[2 * k] + q[2 * k + 1];
        }
        length &= 0xffffu;
        if (UNLIKELY(__any_sync(FULL_WARP, slow || has_zero_half(smallest) || !encoder.fits(length)))) {
#pragma unroll
            for (int k = 0; k < STAGE_STEPS; k++)
                stage[k * 32] = e4[k];
            staged_steps(step0, step0 + STAGE_STEPS);
            return;
        }
        note_differences(step0, e4, first, differs);
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k++)
            encoder.append(quad_code(q[2 * k], q[2 * k + 1]), quad_length(q[2 * k], q[2 * k + 1]));
        encoder.coded += STAGE_STEPS;
        encoder.total += length;
    }

    __device__ __forceinline__ void chunk(u32 step0) {
        uint4 dense[CHUNK_STEPS];  // all loads before the first store: see pooled_encode.cu
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++)
            dense[k] = load_dense(a.dense, quad_index(group, step0 + k, lane));
        uint2 e4[CHUNK_STEPS];
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++) {
            u64 i = quad_index(group, step0 + k, lane);
            Quad q = split_quad(dense[k]);
            e4[k] = exponents4(q.words);
            *(u32*)(a.payload + a.sign_fraction_offset + i) = sign_fractions4(q.words);
            store_low(a.payload + a.low_offset, i, a.num_values, q.low);
        }
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k += STAGE_STEPS)
            four_steps(step0 + k, e4 + k);
    }
};

extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void fixed_encode(const __grid_constant__ Args a) {
    extern __shared__ uint4 shared[];
    u32* pair = (u32*)shared;
    const u32* book = book_tables(a);
    for (u32 i = threadIdx.x; i < PAIR_WORDS; i += WARPS * 32)
        pair[i] = book[TABLE_PAIR + i];
    const EncodeTables tables = {pair, book + TABLE_ENCODE, book[TABLE_WINDOW]};
    const u32 shift = a.book == NO_CHUNK ? a.payload[4] : a.header[1] & 255u;
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.first_group + blockIdx.x * WARPS + warp;
    if (group >= a.end_group) return;
    if (group == 0) begin_payload(a, lane);
    const bool tail = group >= a.full_groups;
    const u32 capacity = tail ? a.tail_capacity : a.capacity, steps = tail ? a.tail_steps : STEPS;
    const u32 old_chunk = a.fresh ? NO_CHUNK : held_chunk(a, group);
    const int credits = a.reserve && old_chunk == NO_CHUNK ? 1 : 0;
    if (!reserve_for_warp(a.arena, credits, lane)) return;

    uint2* stage = (uint2*)(pair + PAIR_WORDS) + warp * (STAGE_STEPS * 32) + lane;
    u32* slot = pair + PAIR_WORDS + WARPS * STAGE_STEPS * 64 + warp * a.capacity * 32;
    clear_slot(slot, capacity * 32, lane);
    __syncwarp();
    GroupEncoder g{a, tables};
    g.stage = stage, g.group = group, g.lane = lane, g.steps = steps, g.shift = shift;
    g.rotate = (128u + 256u - shift - tables.window) * 0x00040004u;
    g.first = g.differs = 0;
    g.encoder.init(slot, capacity, lane);
    g.spill.init(a, old_chunk, credits);
    if (tail) {
        g.guarded_steps(0, steps);
    } else {
#pragma unroll 1
        for (u32 step0 = 0; step0 < STEPS; step0 += CHUNK_STEPS)
            g.chunk(step0);
    }

    u32 markers = g.encoder.coded;
    u32 state = __any_sync(FULL_WARP, g.encoder.stopped) ? STATE_SPILLED << 24 | g.spill.chunk : 0u;
    if (!__any_sync(FULL_WARP, g.differs)) {
        __syncwarp();
        clear_slot(slot, capacity * 32, lane);
        state = STATE_CONSTANT << 24 | (g.first >> 2 & 255u);
        markers = 0;
    } else {
        g.encoder.finish();
    }
    __syncwarp();
    store_slot(a.payload + slot_offset(a, group), slot, capacity * 32, lane);
    a.payload[a.lane_offset + (u64)group * 32 + lane] = (u8)markers;
    if (lane == 0) ((u32*)(a.payload + a.meta_offset))[group] = state;
    g.spill.finish((state >> 24) & STATE_SPILLED, lane);
}
