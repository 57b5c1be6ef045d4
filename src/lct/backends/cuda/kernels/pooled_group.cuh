// Codes one pooled group, four steps at a time, from exponents in registers (docs/format.md, sections 5, 6
// and 8): what encoding a dense tensor and the fused optimizer steps share.
//
// Four steps without zeros, escapes and spills take the fast path; one vote decides. Others go through the
// stage in shared memory (4 quads a lane) one step at a time, so that their code exists once.

struct GroupCoder {
    EncodeTables tables;
    PooledEncoder encoder;
    SpillChunk spill;
    uint2* stage;  // of this lane; rows of 32
    u32 group, lane, my_shift, first, differs;

    __device__ __forceinline__ void init(const EncodeTables& book, u32* slot, u32 capacity, uint2* lane_stage,
                                         u32 group_number, u32 lane_number) {
        tables = book;
        stage = lane_stage;
        group = group_number;
        lane = lane_number;
        my_shift = first = differs = 0;
        encoder.init(slot, capacity, lane);
    }

    // Code the staged quads of steps [from, to), at most STAGE_STEPS, of any kind.
    __device__ __forceinline__ void staged_steps(u32 from, u32 to) {
#pragma unroll 1
        for (u32 step = from; step < to; step++) {
            uint2 e4 = stage[(step - from) * 32];
            u32 even = (step - from) & ~1u;
            u32 shift = span_shift_zeros(stage[even * 32], stage[(even + 1) * 32]);
            if (step == 0) first = __shfl_sync(FULL_WARP, (e4.x & 0xffffu) * 0x00010001u, 0);
            differs |= (e4.x ^ first) | (e4.y ^ first);
            encoder.quad(tables.single, e4, shift);
            if (encoder.stopped) *(u32*)(spill.data(group, lane) + step * 128 + lane * 4) = exponent_bytes(e4);
            if (lane == step / 2 && encoder.coded > (step & ~1u)) my_shift = shift;
        }
        differs = __any_sync(FULL_WARP, differs);
    }

    // Four steps of a full group; exponents times 4.
    __device__ __forceinline__ void four_steps(u32 step0, const uint2* e4) {
        u32 q[2 * STAGE_STEPS], smallest = 0xffffffffu, slow = 0, length = 0, shift[2];
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k += 2) {
            shift[k / 2] = span_shift(e4[k], e4[k + 1]);
            u32 rotate = (128u + 256u - shift[k / 2] - tables.window) * 0x00040004u;
#pragma unroll
            for (int i = k; i < k + 2; i++) {
                u32 rx = e4[i].x + rotate, ry = e4[i].y + rotate;  // bits 10 and up of each half are noise
                q[2 * i] = *(const u32*)((const u8*)tables.pair + pair_offset(rx));
                q[2 * i + 1] = *(const u32*)((const u8*)tables.pair + pair_offset(ry));
                slow |= ((rx | ry) & OUTSIDE_WINDOW) | ((q[2 * i] | q[2 * i + 1]) & SLOW);
                smallest = min3_halves(smallest, e4[i].x, e4[i].y);
                if (i < STAGE_STEPS - 1) length += q[2 * i] + q[2 * i + 1];
            }
        }
        // Codes stand above bit 16 and lengths add up to at most 6 * 16: their sum is the low half.
        bool fast = !__any_sync(FULL_WARP, slow || has_zero_half(smallest)) && encoder.fits(length & 0xffffu, 0);
        if (UNLIKELY(!fast)) {
#pragma unroll
            for (int k = 0; k < STAGE_STEPS; k++)
                stage[k * 32] = e4[k];
            staged_steps(step0, step0 + STAGE_STEPS);
            return;
        }
        note_differences(step0, e4, first, differs);
        if (lane / 2 == step0 / 4) my_shift = lane & 1 ? shift[1] : shift[0];
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k++)
            encoder.append(quad_code(q[2 * k], q[2 * k + 1]), quad_length(q[2 * k], q[2 * k + 1]));
        encoder.coded += STAGE_STEPS;
    }

    // End the streams; returns the group's state word. The slot is complete after a __syncwarp.
    __device__ __forceinline__ u32 close() {
        if (!__any_sync(FULL_WARP, differs)) {
            __syncwarp();
            clear_slot(encoder.slot, encoder.capacity, lane);
            my_shift = 0;
            return STATE_CONSTANT << 24 | (first >> 2 & 255u);
        }
        __syncwarp();
        encoder.finish(lane);
        return encoder.stopped ? (STATE_SPILLED | encoder.coded) << 24 | spill.chunk : 0u;
    }

    // Write slot, shifts and state into the payload, and give back a chunk that is not needed any more.
    __device__ __forceinline__ void commit(const Args& a, u32 state) {
        __syncwarp();
        store_slot(a.payload + slot_offset(a, group), encoder.slot, encoder.capacity, lane);
        a.payload[a.lane_offset + (u64)group * 32 + lane] = (u8)my_shift;
        if (lane == 0) ((u32*)(a.payload + a.meta_offset))[group] = state;
        spill.finish((state >> 24) & STATE_SPILLED || state >> 24 == STATE_WIDE, lane);
    }
};
