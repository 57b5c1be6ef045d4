// One pass of an optimizer over a compressed parameter and its compressed state: decode both, update,
// encode both (docs/format.md). The .cu of an optimizer defines `struct Update` before this file:
//   __device__ Update(const StepArgs&);  __device__ void operator()(u32& p, u32& m, u32 g) const;
// on two packed BF16 values each.
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l updates quad l of each step.
// Shared memory (dynamic): for parameter and state each a decoding and a pair table; then a warp's stage and
// literal buffers and regions. A region holds the old slot, SLACK words from its start, and the new slot grows
// from its start: a new stream may overtake the old one that is still being read, and then the old one is read
// from global memory, where it stays until the end. A group's slots, headers and chunks change at the end, and
// only after credit for both spills was certain; its sign-fraction bytes change on the way, which is safe
// because nothing can fail any more.

#define TENSORS 2   // parameter, state
#define SLACK   32  // words

// The values before the step of one tensor's group. Pointers into the payload are formed where they are
// needed: kept in registers they would cost a block a multiprocessor.
struct OldGroup {
    PooledDecoder<true> decoder;
    const Args& a;
    uint2* stage;  // of this lane
    const u32* table;
    u32 group, lane, state, coded, my_shift;

    // Start fetching the old slot into `slot`; `begin` follows once it is there.
    __device__ __forceinline__ void fetch(u32* slot, u32 group_number, u32 lane_number, u32 steps, u32 capacity) {
        group = group_number;
        lane = lane_number;
        state = ((const u32*)(a.payload + a.meta_offset))[group];
        u32 kind = state >> 24;
        coded = kind == STATE_CODED ? steps : kind & STATE_SPILLED ? min(kind & 0x7fu, steps) : 0u;
        if (capacity < 64) coded = 0;
        my_shift = a.payload[a.lane_offset + (u64)group * 32 + lane];
        if (coded) stage_slot((const u8*)slot_in_payload(a, group), slot, capacity, lane);
    }
    __device__ __forceinline__ void begin(const u32* decode_table, const u32* slot, u32 capacity) {
        table = decode_table;
        decoder.handed = 0;
        if (coded) decoder.init(slot, capacity, lane);
    }
    __device__ __forceinline__ u32 sign_fractions(u64 i) const {
        return *(const u32*)(a.payload + a.sign_fraction_offset + i);
    }
    __device__ __forceinline__ u32 offset(u32 step) const {
        return shift_offset(__shfl_sync(FULL_WARP, my_shift, step / 2));
    }

    // As PooledDecoder::resolve, through the stage: a call would make the loop around it save registers.
    __device__ __forceinline__ void resolve(u32 (&e)[4], u32 offset) {
        const u32* words = decoder.detached ? slot_in_payload(a, group) : decoder.slot;
        uint2* scratch = stage + 2 * 32;  // the rows that `any_steps` leaves free
        scratch[0] = make_uint2(e[0], e[1]);
        scratch[32] = make_uint2(e[2], e[3]);
#pragma unroll 1
        for (u32 j = 0; j < 4; j++) {
            u32* entry = (u32*)(scratch + (j >> 1) * 32) + (j & 1);
            u32 value = *entry, escape = value & ESC_FLAG, last = decoder.capacity * 4 - 1;
            u32 mask = __ballot_sync(FULL_WARP, escape), exponent = 0;
            if (escape)
                exponent = ((const u8*)words)[last - min(decoder.literals + __popc(mask & decoder.below), last)];
            if (value & SPECIAL_FLAGS) *entry = (exponent << 23) - (offset << 16);
            decoder.literals += __popc(mask);
        }
        uint2 low = scratch[0], high = scratch[32];
        e[0] = low.x, e[1] = low.y, e[2] = high.x, e[3] = high.y;
    }

    // The quad of a step of any kind.
    __device__ __forceinline__ uint2 quad(u32 step, u32 sf) {
        u32 shift = offset(step);
        if (step < coded) {
            u32 e[4];
            decoder.quad(table, e, a, group);
            if (any_special(e, e)) resolve(e, shift);
            return join_entries(sf, e, shift);
        }
        if (state >> 24 == STATE_CONSTANT) return join_bytes4(sf, (state & 255u) * 0x01010101u);
        return join_bytes4(sf, *(const u32*)(chunk_data(a.arena, state & REF_MASK) + step * 128 + lane * 4));
    }
    // The quads of two coded steps.
    __device__ __forceinline__ void span(u32 step, const u32* sf, uint2 (&out)[2]) {
        u32 shift = offset(step), e[2][4];
        decoder.quad(table, e[0], a, group);
        decoder.quad(table, e[1], a, group);
        if (UNLIKELY(any_special(e[0], e[1]))) {
            resolve(e[0], shift);
            resolve(e[1], shift);
        }
        out[0] = join_entries(sf[0], e[0], shift);
        out[1] = join_entries(sf[1], e[1], shift);
    }
    // Call after coding steps whose old values were read: has the new slot reached old words to come?
    __device__ __forceinline__ void keep_ahead_of(const PooledEncoder& encoder) {
        if (encoder.handed > SLACK + decoder.handed || !encoder.literal_buffer) decoder.detach();
    }
};

__device__ __forceinline__ void update_quad(const Update& update, uint2& p, uint2& m, uint2 g) {
    update(p.x, m.x, g.x);
    update(p.y, m.y, g.y);
}

// What a lane reads for four steps.
struct Inputs {
    u32 p_sf[STAGE_STEPS], m_sf[STAGE_STEPS];
    uint2 g[STAGE_STEPS];
};

struct GroupStep {
    const StepArgs& s;
    Update update;
    OldGroup old_param, old_state;
    GroupCoder param, state;
    u32 group, lane;

    // Steps [from, to), at most two, of any kind: tails, old groups that spilled or are constant.
    __device__ __forceinline__ void any_steps(u32 from, u32 to) {
#pragma unroll 1
        for (u32 k = 0; k < 2; k++) {
            u64 i = quad_index(group, from + k, lane);
            bool inside = from + k < to && i < s.param.num_values;
            uint2 p = make_uint2(0, 0), m = p;
            if (from + k < to) {
                p = old_param.quad(from + k, inside ? old_param.sign_fractions(i) : 0u);
                m = old_state.quad(from + k, inside ? old_state.sign_fractions(i) : 0u);
            }
            if (inside) {
                uint4 g = load_dense_guarded(s.grad, i, s.param.num_values);
                update_quad(update, p, m, make_uint2(g.x, g.y));
                // Past the end stays +0, whatever the update makes of it.
                u32 keep = s.param.num_values - i < 4 ? (u32)(s.param.num_values - i) : 4u;
                u64 mask = keep == 4 ? ~0ull : (1ull << (16 * keep)) - 1;
                p = make_uint2(p.x & (u32)mask, p.y & (u32)(mask >> 32));
                m = make_uint2(m.x & (u32)mask, m.y & (u32)(mask >> 32));
                *(u32*)(s.param.payload + s.param.sign_fraction_offset + i) = sign_fractions4(p);
                *(u32*)(s.state.payload + s.state.sign_fraction_offset + i) = sign_fractions4(m);
            }
            param.stage[k * 32] = exponents4(p);
            state.stage[k * 32] = exponents4(m);
        }
        param.staged_steps(from, to);
        state.staged_steps(from, to);
        old_param.keep_ahead_of(param.encoder);
        old_state.keep_ahead_of(state.encoder);
    }

    __device__ __forceinline__ Inputs inputs(u32 step0) const {
        u64 i = quad_index(group, step0, lane);
        Inputs in;
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k++) {
            in.p_sf[k] = old_param.sign_fractions(i + k * 128);
            in.m_sf[k] = old_state.sign_fractions(i + k * 128);
            uint4 v = load_dense(s.grad, i + k * 128);
            in.g[k] = make_uint2(v.x, v.y);
        }
        return in;
    }

    // Bring the inputs of later steps into L2, a line of 128 bytes a lane: registers for loads this far ahead
    // would cost a block a multiprocessor.
    __device__ __forceinline__ void prefetch(u32 step0) const {
        u64 i = quad_index(group, step0, 0);
        if (lane >= 4 * STAGE_STEPS || i + STAGE_STEPS * 128 > s.param.num_values) return;
        const u8* line = s.param.payload + s.param.sign_fraction_offset + i;
        if (lane >= STAGE_STEPS) line = s.state.payload + s.state.sign_fraction_offset + i;
        if (lane >= 2 * STAGE_STEPS) line = (const u8*)s.grad + 2 * i;
        line += 128 * (lane < 2 * STAGE_STEPS ? lane % STAGE_STEPS : lane - 2 * STAGE_STEPS);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }

    // Four steps that are coded in both old streams.
    __device__ __forceinline__ void four_steps(u32 step0, const Inputs& in) {
        u64 i = quad_index(group, step0, lane);
        uint2 p_e4[STAGE_STEPS], m_e4[STAGE_STEPS];
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k += 2) {
            uint2 p[2], m[2];
            old_param.span(step0 + k, in.p_sf + k, p);
            old_state.span(step0 + k, in.m_sf + k, m);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                update_quad(update, p[j], m[j], in.g[k + j]);
                u64 at = i + (k + j) * 128;
                *(u32*)(s.param.payload + s.param.sign_fraction_offset + at) = sign_fractions4(p[j]);
                *(u32*)(s.state.payload + s.state.sign_fraction_offset + at) = sign_fractions4(m[j]);
                p_e4[k + j] = exponents4(p[j]);
                m_e4[k + j] = exponents4(m[j]);
            }
        }
        param.four_steps(step0, p_e4);
        state.four_steps(step0, m_e4);
        old_param.keep_ahead_of(param.encoder);
        old_state.keep_ahead_of(state.encoder);
    }
};

__device__ __forceinline__ void load_tables(const Args& a, u32* decode, u32* pair, EncodeTables& tables) {
    const u32* book = book_tables(a);
    for (u32 i = threadIdx.x; i < 256; i += WARPS * 32)
        decode[i] = book[TABLE_DECODE + i];
    for (u32 i = threadIdx.x; i < PAIR_WORDS; i += WARPS * 32)
        pair[i] = book[TABLE_PAIR + i];
    tables = {pair, book + TABLE_ENCODE, book[TABLE_WINDOW]};
}

__device__ __forceinline__ void run_step(const StepArgs& s) {
    extern __shared__ uint4 shared[];
    if (s.found_inf && *s.found_inf == 1.0f) return;
    u32* decode = (u32*)shared;
    u32* pair = decode + TENSORS * 256;
    EncodeTables param_tables, state_tables;
    load_tables(s.param, decode, pair, param_tables);
    load_tables(s.state, decode + 256, pair + PAIR_WORDS, state_tables);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = s.param.first_group + blockIdx.x * WARPS + warp;
    const bool active = group < s.param.end_group, tail = group >= s.param.full_groups;
    const u32 steps = tail ? s.param.tail_steps : STEPS;
    const u32 p_capacity = tail ? s.param.tail_capacity : s.param.capacity;
    const u32 m_capacity = tail ? s.state.tail_capacity : s.state.capacity;
    const u32 region_words = s.param.capacity + s.state.capacity + TENSORS * SLACK;
    u32* stage =
        pair + TENSORS * PAIR_WORDS + warp * (TENSORS * (STAGE_STEPS * 64 + LITERAL_BUFFER / 4) + region_words);
    u8* literals = (u8*)(stage + TENSORS * STAGE_STEPS * 64);
    u32* p_region = stage + TENSORS * (STAGE_STEPS * 64 + LITERAL_BUFFER / 4);
    u32* m_region = p_region + s.param.capacity + SLACK;

    GroupStep step{s, Update(s), {{}, s.param, (uint2*)stage + lane}, {{}, s.state, (uint2*)stage + lane}};
    step.group = group, step.lane = lane;
    if (active) {
        step.old_param.fetch(p_region + SLACK, group, lane, steps, p_capacity);
        step.old_state.fetch(m_region + SLACK, group, lane, steps, m_capacity);
    }
    stage_wait();
    __syncthreads();
    if (!active) return;

    const u32 p_chunk = held_chunk(s.param, group), m_chunk = held_chunk(s.state, group);
    const int p_credit = s.param.reserve && p_chunk == NO_CHUNK, m_credit = s.param.reserve && m_chunk == NO_CHUNK;
    if (!reserve_for_warp(s.param.arena, p_credit + m_credit, lane)) return;
    step.old_param.begin(decode, p_region + SLACK, p_capacity);
    step.old_state.begin(decode + 256, m_region + SLACK, m_capacity);
    __syncwarp();
    step.param.init(param_tables, p_region, p_capacity, (uint2*)stage + lane, group, lane);
    step.state.init(state_tables, m_region, m_capacity, (uint2*)stage + STAGE_STEPS * 32 + lane, group, lane);
    step.param.encoder.literal_buffer = literals;
    step.state.encoder.literal_buffer = literals + LITERAL_BUFFER;
    step.param.spill.init(s.param, p_chunk, p_credit);
    step.state.spill.init(s.state, m_chunk, m_credit);

    const u32 coded = tail ? 0u : min(step.old_param.coded, step.old_state.coded);
    u32 step0 = 0;
#pragma unroll 1
    for (; step0 + STAGE_STEPS <= coded; step0 += STAGE_STEPS) {
        Inputs in = step.inputs(step0);
        step.prefetch(step0 + 2 * STAGE_STEPS);
        step.four_steps(step0, in);
    }
#pragma unroll 1
    for (; step0 < steps; step0 += 2)
        step.any_steps(step0, min(step0 + 2, steps));
    u32 p_state = step.param.close(), m_state = step.state.close();
    step.param.commit(s.param, p_state);
    step.state.commit(s.state, m_state);
}
