// Encode a dense tensor into fixed streams: CLEAN, MEDIUM, HIGH (docs/format.md, sections 3, 7 and 8).
//
// Thread mapping: one block of threads a block of 256 streams (8 warps), one warp a group of 32 streams.
// Shared memory (dynamic): encode tables, then a slot a warp. Two steps without zeros, escapes and spills take the
// fast path.

// Steps whose loads are in flight together.
#define CHUNK_STEPS (VALUE_BYTES == 4 ? 4 : 8)

struct GroupEncoder {
    const Args& a;
    EncodeTables tables;
    FixedEncoder encoder;
    SpillChunk spill;
    u32 group, lane, shift, rotate, first, differs;

    // One step of any kind.
    __device__ __forceinline__ void slow_step(u32 step, uint2 e) {
        encoder.quad(tables.single, e, shift);
        if (__any_sync(FULL_WARP, encoder.stopped)) {
            u8* data = spill.data(a, group, lane);
            if (encoder.stopped) *(u32*)(data + step * 128 + lane * 4) = exponent_bytes(e);
        }
    }

    // Whether all exponents of the group are equal, asked while that may still be.
    __device__ __forceinline__ void note_differences(u32 step, uint2 e) {
        if (UNLIKELY(!differs)) {
            if (step == 0) first = __shfl_sync(FULL_WARP, (e.x & 0xffffu) * 0x00010001u, 0);
            differs = __any_sync(FULL_WARP, (e.x ^ first) | (e.y ^ first));
        }
    }

    // Steps [from, to) near the end of the tensor.
    __device__ __forceinline__ void guarded_steps(u32 from, u32 to) {
#pragma unroll 1
        for (u32 step = from; step < to; step++) {
            u64 i = quad_index(group, step, lane);
            Quad q = split_quad(load_dense_guarded(a.dense, i, a.num_values));
            if (i < a.num_values) *(u32*)(a.payload + a.sign_fraction_offset + i) = sign_fractions4(q.words);
            store_low(a.payload + a.low_offset, i, a.num_values, q.low);
            note_differences(step, exponents(q.words));
            slow_step(step, exponents(q.words));
        }
    }

    // Two steps of a full group.
    __device__ __forceinline__ void span(u32 step, const uint2* e) {
        note_differences(step, e[0]);
        note_differences(step + 1, e[1]);
        u32 r[4] = {e[0].x + rotate, e[0].y + rotate, e[1].x + rotate, e[1].y + rotate}, q[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            q[i] = *(const u32*)((const u8*)tables.pairs + pair_offset(r[i]));
        u32 later = q[2] + q[3], length = q[0] + q[1] + later;
        // As in pooled_group.cuh.
        u32 slow = ((r[0] | r[1] | r[2]) | r[3]) & OUTSIDE_WINDOW | length & 0xe0u;
        if (UNLIKELY(__any_sync(FULL_WARP, slow || shift_is_near_zero(shift) || !encoder.fits(length & 31u)))) {
#pragma unroll 1
            for (u32 odd = 0; odd < 2; odd++)
                slow_step(step + odd, odd ? e[1] : e[0]);
            return;
        }
        encoder.append(__funnelshift_l(0u, quad_code(q[0], q[1]), later) | quad_code(q[2], q[3]), length & 31u);
        encoder.coded += 2;
    }

    __device__ __forceinline__ void chunk(u32 step0) {
        uint4 dense[CHUNK_STEPS];  // all loads before the first store, over which the compiler may move none
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++)
            dense[k] = load_dense(a.dense, quad_index(group, step0 + k, lane));
        uint2 e[CHUNK_STEPS];
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k++) {
            u64 i = quad_index(group, step0 + k, lane);
            Quad q = split_quad(dense[k]);
            e[k] = exponents(q.words);
            *(u32*)(a.payload + a.sign_fraction_offset + i) = sign_fractions4(q.words);
            store_low(a.payload + a.low_offset, i, a.num_values, q.low);
        }
#pragma unroll
        for (int k = 0; k < CHUNK_STEPS; k += 2)
            span(step0 + k, e + k);
    }
};

extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void fixed_encode(const __grid_constant__ Args a) {
    extern __shared__ uint4 shared[];
    u32* table = (u32*)shared;
    wait_for_previous();
    const EncodeTables tables = stage_encode_tables(table, book_tables(a));
    const u32 shift = a.book == NO_CHUNK ? a.payload[4] : a.header[1] & 255u;
    __shared__ bool admitted;
    reserve_for_block(a, blockIdx.x, 1, admitted);
    stage_wait();
    __syncthreads();
    const u32 warp = warp_number(), lane = threadIdx.x % 32, group = a.first_group + blockIdx.x * WARPS + warp;
    if (group >= a.end_group) return;
    if (group == 0 && (admitted || a.fresh)) begin_payload(a, lane);
    if (!admitted) {
        leave_group(a, group, lane);
        return;
    }
    const bool tail = group >= a.full_groups;
    const u32 capacity = tail ? a.tail_capacity : a.capacity, steps = tail ? a.tail_steps : STEPS;

    u32* slot = table + ENCODE_TABLE_WORDS + warp * a.capacity * 32;
    clear_slot(slot, capacity * 32, lane);
    __syncwarp();
    GroupEncoder g{a, tables};
    g.group = group, g.lane = lane, g.shift = shift, g.rotate = rotation(tables.origin, shift);
    g.first = g.differs = 0;
    g.encoder.init(slot, capacity, lane);
    g.spill.init(a, a.fresh ? NO_CHUNK : held_chunk(a, group), 1);
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
        state = STATE_CONSTANT << 24 | (g.first >> 7 & 255u);
        markers = 0;
    } else {
        g.encoder.finish();
    }
    __syncwarp();
    store_slot(a.payload + slot_offset(a, group), slot, capacity * 32, lane);
    a.payload[a.lane_offset + (u64)group * 32 + lane] = (u8)markers;
    if (lane == 0) ((u32*)(a.payload + a.meta_offset))[group] = state;
    g.spill.finish(a, (state >> 24) & STATE_SPILLED, lane);
}
