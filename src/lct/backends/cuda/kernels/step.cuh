// One pass of an optimizer over a compressed parameter and its compressed state: decode both, update,
// encode both (docs/format.md). The .cu of an optimizer defines `struct Update` before this file:
//   __device__ Update(const StepArgs&);  __device__ void operator()(u32& p, u32& m, u32 g) const;
// on two packed BF16 values each.
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l updates quad l of each step.
// Shared memory (dynamic): for parameter and state each a decoding and a pair table; then a warp's stage and
// its slots: old parameter, old state, new parameter, new state. Old streams are read from their own copy,
// so that a new stream may be longer than the old one at any point. A group's slots, headers and chunks
// change at the end, and only after credit for both spills was certain; its sign-fraction bytes change on
// the way, which is safe because nothing can fail any more.

#define TENSORS 2  // parameter, state

struct OldGroup {
    PooledDecoder decoder;
    const u32* table;
    const u8* sign_fractions;
    const u8* chunk;
    u32 state, coded, my_shift;

    // Start fetching the old slot into `slot`; `begin` follows once it is there.
    __device__ __forceinline__ void fetch(const Args& a, u32* slot, u32 group, u32 lane, u32 steps, u32 capacity) {
        state = ((const u32*)(a.payload + a.meta_offset))[group];
        u32 kind = state >> 24;
        coded = kind == STATE_CODED ? steps : kind & STATE_SPILLED ? min(kind & 0x7fu, steps) : 0u;
        if (capacity < 64) coded = 0;
        chunk = kind & STATE_SPILLED ? chunk_data(a.arena, state & REF_MASK) : nullptr;
        my_shift = a.payload[a.lane_offset + (u64)group * 32 + lane];
        sign_fractions = a.payload + a.sign_fraction_offset;
        if (coded) stage_slot(a.payload + slot_offset(a, group), slot, capacity, lane);
    }
    __device__ __forceinline__ void begin(const u32* decode_table, const u32* slot, u32 lane, u32 capacity) {
        table = decode_table;
        if (coded) decoder.init(slot, capacity, lane);
    }
    __device__ __forceinline__ u32 offset(u32 step) const { return shift_offset(__shfl_sync(FULL_WARP, my_shift, step / 2)); }

    // The quad of a step of any kind.
    __device__ __forceinline__ uint2 quad(u32 step, u32 lane, u32 sf) {
        u32 shift = offset(step);
        if (step < coded) {
            u32 e[4];
            decoder.quad(table, e);
            if (any_special(e, e)) decoder.resolve(e, shift);
            return join_entries(sf, e, shift);
        }
        return join_bytes4(sf, chunk ? *(const u32*)(chunk + step * 128 + lane * 4) : (state & 255u) * 0x01010101u);
    }
    // The quads of two coded steps.
    __device__ __forceinline__ void span(u32 step, const u32* sf, uint2 (&out)[2]) {
        u32 shift = offset(step), e[2][4];
        decoder.quad(table, e[0]);
        decoder.quad(table, e[1]);
        if (UNLIKELY(any_special(e[0], e[1]))) {
            decoder.resolve(e[0], shift);
            decoder.resolve(e[1], shift);
        }
        out[0] = join_entries(sf[0], e[0], shift);
        out[1] = join_entries(sf[1], e[1], shift);
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
                p = old_param.quad(from + k, lane, inside ? *(const u32*)(old_param.sign_fractions + i) : 0u);
                m = old_state.quad(from + k, lane, inside ? *(const u32*)(old_state.sign_fractions + i) : 0u);
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
    }

    __device__ __forceinline__ Inputs inputs(u32 step0) const {
        u64 i = quad_index(group, step0, lane);
        Inputs in;
#pragma unroll
        for (int k = 0; k < STAGE_STEPS; k++) {
            in.p_sf[k] = *(const u32*)(old_param.sign_fractions + i + k * 128);
            in.m_sf[k] = *(const u32*)(old_state.sign_fractions + i + k * 128);
            uint4 v = load_dense(s.grad, i + k * 128);
            in.g[k] = make_uint2(v.x, v.y);
        }
        return in;
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
    }
};

__device__ __forceinline__ void load_tables(const Args& a, u32* decode, u32* pair, EncodeTables& tables) {
    const u32* book = book_tables(a);
    for (u32 i = threadIdx.x; i < 256; i += WARPS * 32) decode[i] = book[TABLE_DECODE + i];
    for (u32 i = threadIdx.x; i < PAIR_WORDS; i += WARPS * 32) pair[i] = book[TABLE_PAIR + i];
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
    u32* stage = pair + TENSORS * PAIR_WORDS + warp * (TENSORS * STAGE_STEPS * 64);
    u32* slots = pair + TENSORS * PAIR_WORDS + WARPS * TENSORS * STAGE_STEPS * 64 + warp * 2 * (s.param.capacity + s.state.capacity);
    u32 *old_p = slots, *old_m = old_p + s.param.capacity, *new_p = old_m + s.state.capacity, *new_m = new_p + s.param.capacity;

    GroupStep step{s, Update(s)};
    step.group = group, step.lane = lane;
    if (active) {
        step.old_param.fetch(s.param, old_p, group, lane, steps, p_capacity);
        step.old_state.fetch(s.state, old_m, group, lane, steps, m_capacity);
    }
    stage_wait();
    __syncthreads();
    if (!active) return;

    const u32 p_chunk = held_chunk(s.param, group), m_chunk = held_chunk(s.state, group);
    const int p_credit = s.param.reserve && p_chunk == NO_CHUNK, m_credit = s.param.reserve && m_chunk == NO_CHUNK;
    if (!reserve_for_warp(s.param.arena, p_credit + m_credit, lane)) return;
    step.old_param.begin(decode, old_p, lane, p_capacity);
    step.old_state.begin(decode + 256, old_m, lane, m_capacity);
    step.param.init(param_tables, new_p, p_capacity, (uint2*)stage + lane, group, lane);
    step.state.init(state_tables, new_m, m_capacity, (uint2*)stage + STAGE_STEPS * 32 + lane, group, lane);
    step.param.spill.init(s.param, p_chunk, p_credit);
    step.state.spill.init(s.state, m_chunk, m_credit);

    const u32 coded = tail ? 0u : min(step.old_param.coded, step.old_state.coded);
    u32 step0 = 0;
    if (coded >= STAGE_STEPS) {
        // The next inputs are on their way while these are worked on.
        Inputs next = step.inputs(0);
#pragma unroll 1
        for (; step0 + STAGE_STEPS <= coded; step0 += STAGE_STEPS) {
            Inputs now = next;
            if (step0 + 2 * STAGE_STEPS <= coded) next = step.inputs(step0 + STAGE_STEPS);
            step.four_steps(step0, now);
        }
    }
#pragma unroll 1
    for (; step0 < steps; step0 += 2) step.any_steps(step0, min(step0 + 2, steps));
    u32 p_state = step.param.close(), m_state = step.state.close();
    step.param.commit(s.param, p_state);
    step.state.commit(s.state, m_state);
}
