// Decode several tensors in one launch (pooled_decode.cuh).

// Mirrors codec.DecodeList: blocks first_block[k] to first_block[k + 1] - 1 take tensor k. Behind the last tensor stand
// the number of blocks and, up to the end, 0xffffffff.
struct DecodeList {
    u32 first_block[MOST_DECODES + 1];
    Args tensors[MOST_DECODES];
};

extern "C" __global__ __launch_bounds__(WARPS * 32,
                                        MIN_BLOCKS) void pooled_decode_list(const __grid_constant__ DecodeList list) {
    // Without a loop: its look-ups would wait for one another, in every block.
    u32 number = 0;
#pragma unroll
    for (int k = 1; k < MOST_DECODES; k++)
        number += blockIdx.x >= list.first_block[k];
    decode_block(list.tensors[number], blockIdx.x - list.first_block[number]);
}
