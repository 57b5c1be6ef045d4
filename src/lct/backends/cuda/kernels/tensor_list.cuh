// Several tensors in one launch.

// Mirrors codec.TensorList: blocks first_block[k] to first_block[k + 1] - 1 take tensor k. Behind the last tensor stand
// the number of blocks and, up to the end, 0xffffffff.
struct TensorList {
    u32 first_block[MOST_TENSORS + 1];
    Args tensors[MOST_TENSORS];
};

// The tensor that this block works on.
__device__ __forceinline__ u32 tensor_of_block(const TensorList& list) {
    // Without a loop: its look-ups would wait for one another, in every block.
    u32 number = 0;
#pragma unroll
    for (int k = 1; k < MOST_TENSORS; k++)
        number += blockIdx.x >= list.first_block[k];
    return number;
}
