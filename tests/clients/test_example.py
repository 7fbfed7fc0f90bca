"""`examples/hugging_face.py`: a patched Llama of transformers learns as the original does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_examples import example

pytest.importorskip("transformers", reason="an extra of its own: make test-clients installs it")

# Few and short, for interpreted kernels.
SHORT = {"STEPS": 6, "BATCH": 2, "LENGTH": 8}


def test_a_patched_llama_learns_as_the_original_does(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example(repository, "hugging_face")
    for name, value in SHORT.items():
        monkeypatch.setattr(module, name, value)
    before, after = module.main()
    assert after == pytest.approx(before, rel=1e-4)
    assert after[-1] < after[0]
    assert "swapped  5 x LlamaRMSNorm" in capsys.readouterr().out
