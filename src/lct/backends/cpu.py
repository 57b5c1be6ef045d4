"""INTERIM: replaced by the numba backend."""
from . import reference
group_needs = reference.group_needs
def select(values, layout, candidates):
    return reference.select(reference.split(values, layout.dtype)[0], layout, candidates)
def encode(values, layout, book, shift, payload=None):
    p, s = reference.encode(values, layout, book, shift)
    if payload is not None:
        payload[:] = p
        p = payload
    return p, s
def decode(payload, spill, out=None):
    v = reference.decode(payload, spill)
    if out is not None:
        out[:] = v
        v = out
    return v
