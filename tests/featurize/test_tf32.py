"""The permission of TF32 can be read and set, whichever of PyTorch's APIs was used before."""

import warnings

import pytest
import torch

from featurize.operators.torch_releases import allow_tf32, cudnn_allows_tf32, matmul_allows_tf32

NEW_API = hasattr(torch.backends, "fp32_precision")
HAS_BOTH = pytest.mark.skipif(not NEW_API, reason="this release of PyTorch has the older API only")


@pytest.fixture(autouse=True)
def _as_it_was():
    cudnn = torch.backends.cudnn
    parts = (torch.backends, torch.backends.cuda.matmul, cudnn, cudnn.conv, cudnn.rnn) if NEW_API else ()
    before = [part.fp32_precision for part in parts]
    if NEW_API:  # as in a fresh process, whatever other tests have set
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = cudnn.fp32_precision = "none"
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    for part, precision in zip(parts, before, strict=True):
        part.fp32_precision = precision


def test_the_older_api_is_read():
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
    assert matmul_allows_tf32() and not cudnn_allows_tf32()


@HAS_BOTH
@pytest.mark.parametrize("part", ["torch.backends", "torch.backends.cuda.matmul"])
def test_the_newer_api_is_read_without_an_error_or_a_warning(part):
    owner = torch.backends if part == "torch.backends" else torch.backends.cuda.matmul
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not matmul_allows_tf32() and cudnn_allows_tf32()
        owner.fp32_precision = "tf32"
        assert matmul_allows_tf32() and cudnn_allows_tf32()


@HAS_BOTH
def test_convolutions_without_tf32_by_the_newer_api_are_seen():
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert not cudnn_allows_tf32()


@pytest.mark.parametrize(("matmul", "cudnn"), [(True, True), (False, False), (True, False)])
def test_a_setting_holds_whatever_the_newer_api_has_set_before(matmul, cudnn):
    if NEW_API:
        torch.backends.fp32_precision = "tf32"
    allow_tf32(matmul=matmul, cudnn=cudnn)
    assert (matmul_allows_tf32(), cudnn_allows_tf32()) == (matmul, cudnn)
