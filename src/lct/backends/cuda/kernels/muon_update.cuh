// The arithmetic of Muon's momentum: the buffer, and the update that torch orthogonalises.
#define TENSORS      1
#define DENSE_UPDATE 1

// Mirrors steps.MuonArgs (ctypes).
struct StepArgs {
    Args tensors[TENSORS];
    void* grad;
    void* update;                      // dense, written
    float buffer_share, update_share;  // of `end - self` in torch's two lerps
};

// Two of torch's lerps, each rounded to BF16: the buffer's towards the gradient, and from the gradient towards the new
// buffer. Torch's starts from the nearer end: self + w * (end - self), or end - (1 - w) * (end - self), and is
// contracted as in adam_update.cuh.
// BUFFER_FROM_GRAD, UPDATE_FROM_GRAD: 1 where the gradient is the end that the buffer (the update) starts from.
struct Update {
    float buffer_share, update_share;

    __device__ __forceinline__ Update(const StepArgs& s) : buffer_share(s.buffer_share), update_share(s.update_share) {}

    // Packed values: the buffer is replaced, the gradient becomes the update.
    __device__ __forceinline__ void operator()(u32 (&values)[TENSORS][4], u32 (&grad)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            two(values[0][i], grad[i]);
    }

  private:
    __device__ __forceinline__ void two(u32& buffer, u32& grad) const {
        const float2 g = unpack2(grad), old = unpack2(buffer);
        buffer = pack2(stepped(buffer_share, old, g, BUFFER_FROM_GRAD ? g : old));
        const float2 b = unpack2(buffer);
        grad = pack2(stepped(update_share, g, b, UPDATE_FROM_GRAD ? g : b));
    }

    __device__ __forceinline__ static float2 stepped(float share, float2 self, float2 end, float2 from) {
        return make_float2(__fmaf_rn(share, __fsub_rn(end.x, self.x), from.x),
                           __fmaf_rn(share, __fsub_rn(end.y, self.y), from.y));
    }
};
