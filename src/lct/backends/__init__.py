"""The same few functions three times: reference (NumPy, obvious), cpu (numba), cuda (NVRTC)."""
