"""Whatever a recording was made of since: it is refused and kept, or added to and still a manifest."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import normforge
from normforge.codegen import manifest
from normforge.codegen.instance import Bucket
from normforge.codegen.model import Mode
from normforge.codegen.tiling import standard_ladder
from normforge.codegen.values import DType, Norm
from normforge.errors import RecordError
from normforge.selection import recording

from .documents import manifests, scalars
from .mutation import cut, fire
from .world import new_world, refusal, snapshot

MODES = (Mode(Norm.LAYER, DType.FP32, DType.FP32), Mode(Norm.RMS, DType.BF16, DType.BF16, save_mv=True))
BUCKETS = (*standard_ladder(), Bucket("n4096", 1, 4096), Bucket("n100", 50, 100), Bucket("nbig", 3000, None))
_MARKER = b"# Recorded by normforge\n"


@st.composite
def recordings(draw: st.DrawFn) -> bytes:
    """What a recording wrote, cut about; or another manifest behind its first line."""
    if draw(st.booleans()):
        return _MARKER + draw(manifests())
    pairs = st.tuples(st.sampled_from(MODES), st.sampled_from(BUCKETS))
    data = recording.manifest_of(draw(st.lists(pairs, min_size=1, max_size=4))).encode()
    if draw(st.booleans()):
        data = draw(cut(data, scalars.map(lambda word: word.encode("utf-8", "surrogatepass"))))
    return data


@fire(100)
@given(recordings())
def test_a_recording(data: bytes) -> None:
    with new_world() as world:
        path = world / "needed.yaml"
        path.write_bytes(data)
        before = snapshot(world)

        def record() -> None:
            with normforge.record(path):
                normforge.layernorm2d_fwd(torch.empty(0, 200))

        said = refusal(record, RecordError)
        if said is not None:
            assert str(path) in said
            assert snapshot(world) == before
            return
        assert set(snapshot(world)) == {"needed.yaml"}
        made = manifest.load(path).instances
        assert any(instance.mode == MODES[0] and 200 in instance.bucket for instance in made)
        if data:
            path.write_bytes(data)
            held = {(instance.mode, n) for instance in manifest.load(path).instances for n in _ends(instance.bucket)}
            assert all(any(mode == instance.mode and n in instance.bucket for instance in made) for mode, n in held)


def _ends(bucket: Bucket) -> tuple[int, int]:
    return bucket.first, 10**17 if bucket.last is None else bucket.last
