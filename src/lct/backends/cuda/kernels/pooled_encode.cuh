// What one block does to encode a dense tensor into pooled streams (docs/format.md, sections 5, 6 and 8).
//
// Thread mapping: one warp a group of 8,192 values, WARPS groups a block; lane l codes quad l of each step.
// Shared memory (dynamic): encode tables, then a slot a warp. Every value of a group is read once; sign-fraction
// bytes leave at once, the slot at the end.

// Steps [0, steps) near the end of the tensor; returns the OR of the low bits.
__device__ __forceinline__ u32 guarded_steps(const Args& a, GroupCoder& g, u32 steps) {
    u32 low_bits = 0;
#pragma unroll 1
    for (u32 step0 = 0; step0 < steps; step0 += 2) {
        uint2 e[2];
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            u64 i = quad_index(g.group, step0 + k, g.lane);
            bool inside = step0 + k < steps && i < a.num_values;
            Quad q = split_quad(inside ? load_dense_guarded(a.dense, i, a.num_values) : make_uint4(0, 0, 0, 0));
            e[k] = exponents(q.words);
            if (inside) *(u32*)(a.payload + a.sign_fraction_offset + i) = sign_fractions4(q.words);
            low_bits |= q.low.x | q.low.y;
            store_low(a.payload + a.low_offset, i, a.num_values, q.low);
        }
        g.any_span(step0, e[0], e[1], min(2u, steps - step0));
    }
    return low_bits;
}

// Lower halves are not zero although the payload has no room for them: read the group again and store it
// wide. Returns the state.
__device__ __forceinline__ u32 store_wide(const Args& a, GroupCoder& g, u32 steps) {
    u8* exponent_chunk = g.spill_data();
    u32 lower_ref = g.take_chunk_too(), upper_ref = g.take_chunk_too();
    u8 *lower = chunk_data(a.arena, lower_ref), *upper = chunk_data(a.arena, upper_ref);
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        u64 i = quad_index(g.group, step, g.lane);
        Quad q = split_quad(load_dense_guarded(a.dense, i, a.num_values));
        u32 at = step * 128 + g.lane * 4;
        *(u32*)(exponent_chunk + at) = exponent_bytes(exponents(q.words));
        *(uint2*)((step < 32 ? lower : upper) + at % 4096 * 2) = q.low;
    }
    __syncwarp();
    clear_slot(g.encoder.slot, g.capacity(), g.lane);
    __syncwarp();
    if (g.lane < 2) g.encoder.slot[g.lane] = g.lane ? upper_ref : lower_ref;
    g.my_shift = 0;
    return STATE_WIDE << 24 | g.rare->spill.chunk;
}

// Values of two steps of a full group.
struct Span {
    uint4 dense[2];

    __device__ __forceinline__ void load(const Args& a, u64 i) {
        dense[0] = load_dense(a.dense, i);
        dense[1] = load_dense(a.dense, i + 128);
    }
    // Store sign-fraction bytes and low bits, code the exponents; returns the OR of the low bits.
    __device__ __forceinline__ u32 encode(const Args& a, u64 i, GroupCoder& g, u32 step) const {
        uint2 e[2];
        u32 low_bits = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            Quad q = split_quad(dense[k]);
            e[k] = exponents(q.words);
            __stcs((u32*)(a.payload + a.sign_fraction_offset + i + k * 128), sign_fractions4(q.words));
            low_bits |= q.low.x | q.low.y;
            store_low(a.payload + a.low_offset, i + k * 128, a.num_values, q.low);
        }
        g.span(step, e[0], e[1]);
        return low_bits;
    }
};

// `block`: its number among those of the tensor.
__device__ __forceinline__ void encode_block(const Args& a, u32 block) {
    extern __shared__ uint4 shared[];
    u32* table = (u32*)shared;
    const u32 warp = warp_number(), lane = threadIdx.x % 32, group = a.first_group + block * warps() + warp;
    const bool active = group < a.end_group, tail = group >= a.full_groups;
    const u64 start = quad_index(group, 0, lane);
    const u8* first_value = (const u8*)a.dense + (start - lane * 4) * VALUE_BYTES;
    // Two spans take turns: each is loaded while the other is coded. One buffer that is copied would not do, as the
    // compiler waits for a load where it copies.
    Span even, odd;
    if (active && !tail) {
        even.load(a, start);
        prefetch(first_value, PREFETCH_STEPS * 128 * VALUE_BYTES, lane);
    }
    __shared__ bool admitted;
    const int chunks = DTYPE == 4 ? 3 : 1;
    wait_for_previous();
    reserve_for_block(a, block, chunks, admitted);
    const EncodeTables tables = stage_encode_tables(table, book_tables(a));
    stage_wait();
    __syncthreads();
    if (!active) return;
    if (group == 0 && (admitted || a.fresh)) begin_payload(a, lane);
    if (!admitted) {
        leave_group(a, group, lane);
        return;
    }
    u32* slot = table + ENCODE_TABLE_WORDS + warp * a.capacity;
    GroupCoder g;
    g.init(a, tables, slot, a.fresh ? NO_CHUNK : held_chunk(a, group), chunks, group, lane);
    u32 low_bits = 0;
    if (tail) {
        low_bits = guarded_steps(a, g, a.tail_steps);
    } else {
#pragma unroll 1
        for (u32 step = 0; step < STEPS; step += 4) {
            const u64 i = start + step * 128;
            if (prefetch_is_due(step))
                prefetch(first_value + (step + PREFETCH_STEPS) * (128 * VALUE_BYTES),
                         PREFETCH_STEPS * 128 * VALUE_BYTES, lane);
            odd.load(a, i + 256);
            low_bits |= even.encode(a, i, g, step);
            if (step + 4 < STEPS) even.load(a, i + 512);
            low_bits |= odd.encode(a, i + 256, g, step + 2);
        }
    }
    bool wide = DTYPE == 4 && __any_sync(FULL_WARP, low_bits);
    u32 state = wide ? store_wide(a, g, tail ? a.tail_steps : STEPS) : g.close();
    __syncwarp();
    store_slot(a.payload + slot_offset(a, group), slot, g.capacity(), lane);
    g.commit(state);
}
