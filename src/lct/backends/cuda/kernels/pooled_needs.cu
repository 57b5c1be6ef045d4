// Words that each pooled group needs so that nothing spills (docs/format.md, section 6): lengths only.
// One warp a group; `payload` points at the int32 results, `header[0]` is the book.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void pooled_needs(const __grid_constant__ Args a,
                                                                                  u32* needs) {
    u32 lane = threadIdx.x % 32, group = blockIdx.x * WARPS + warp_number();
    if (group >= a.end_group) return;
    const u32* table = book_tables(a) + TABLE_ENCODE;
    u32 steps = group < a.full_groups ? STEPS : a.tail_steps;
    u32 count = 0, handed = 64, literals = 0, first = 0, other = 0;
    for (u32 step = 0; step < steps; step += 2) {
        uint2 v[2];
        for (int k = 0; k < 2; k++) {
            u64 i = quad_index(group, step + k, lane);
            uint4 dense = step + k < steps ? load_dense_guarded(a.dense, i, a.num_values) : make_uint4(0, 0, 0, 0);
            v[k] = exponents(split_quad(dense).words);
        }
        u32 shift = span_shift_zeros(v[0], v[1]);
        if (step == 0) first = __shfl_sync(FULL_WARP, (v[0].x & 0xffffu) * 0x00010001u, 0);
        for (int k = 0; k < 2 && step + k < steps; k++) {
            other |= (v[k].x ^ first) | (v[k].y ^ first);
            u32 e[4] = {v[k].x >> 7 & 255u, v[k].x >> 23, v[k].y >> 7 & 255u, v[k].y >> 23}, length = 0;
            for (int j = 0; j < 4; j++) {
                u32 q = table[symbol_of(e[j], shift)];
                length += q & 31u;
                literals += __popc(__ballot_sync(FULL_WARP, q & ESCAPED));
            }
            bool need = k ? count + length > 64 : count >= 32;
            handed += __popc(__ballot_sync(FULL_WARP, need));
            count += length - (need ? 32 : 0);
        }
    }
    bool constant = !__any_sync(FULL_WARP, other);
    if (lane == 0) needs[group] = constant ? 0u : handed + (literals + 3) / 4;
}
