"""The allocator's settings: read and refused as PyTorch does, which is asked itself where it can be."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from conf.errors import UsageError
from featurize.memory.allocator_settings import AllocatorSettings


def test_settings_are_read_in_pytorchs_spelling_and_spelled_back():
    settings = AllocatorSettings.parse(
        " max_split_size_mb:128 , roundup_power2_divisions:[64:8,256:4,1024:2,>:1],garbage_collection_threshold:0.8,"
        "expandable_segments:True,backend:native,pinned_use_background_threads:True,"
    )
    assert settings.max_split_size_mb == 128
    # Entry i is for sizes from 2**i MiB; what lies between named ones is off.
    assert settings.roundup_power2_divisions == (8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 2, 1, 1, 1, 1, 1)
    assert settings.expandable_segments and settings.garbage_collection_threshold == 0.8
    assert AllocatorSettings.parse(settings.to_text()) == settings
    assert AllocatorSettings().to_text() == ""


VALID = [
    "max_split_size_mb:20",
    "max_non_split_rounding_mb:20",
    "large_segment_size_mb:11",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "garbage_collection_threshold:0.99",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[64:4,>:0]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[131072:4]",
    "roundup_power2_divisions:[]",
    "expandable_segments:False",
    "max_split_size_mb:64,max_split_size_mb:128",
    "",
]
INVALID = [
    "max_split_size_mb:19",
    "max_split_size_mb:x",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_non_split_rounding_mb:10",
    "large_segment_size_mb:10",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[63:4]",
    "roundup_power2_divisions:[64:4",
    "expandable_segments:true",
    "max_split_size_mb:128;expandable_segments:True",
]


@pytest.mark.parametrize("text", VALID)
def test_valid_settings_are_taken(text):
    AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    "text", [*INVALID, "backend:cudaMallocAsync", "max_split_size_mb:-1", "max_split_size_mb:64.5"]
)
def test_invalid_settings_name_the_key(text):
    with pytest.raises(UsageError, match=text.split(":")[0]):
        AllocatorSettings.parse(text)


def test_every_bad_setting_is_reported_and_unknown_ones_list_the_known():
    with pytest.raises(UsageError, match=r"max_split_size_mb.*garbage_collection_threshold"):
        AllocatorSettings.parse("max_split_size_mb:3,garbage_collection_threshold:7")
    with pytest.raises(UsageError, match=r"unknown key 'max_split'; known: .*expandable_segments.*roundup_power2"):
        AllocatorSettings.parse("max_split:128")


def taken_by_pytorch(texts):
    """Return whether PyTorch takes each of the settings, in a process of which nothing else is asked."""
    taken = []
    for text in texts:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # the one that stays from call to call
        try:
            torch._C._accelerator_setAllocatorSettings(text)
            taken.append(True)
        except Exception:
            taken.append(False)
    return taken


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="this PyTorch parses them on a GPU only"
)
def test_pytorch_itself_takes_and_refuses_the_same_settings():
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        taken = pool.submit(taken_by_pytorch, [*VALID, *INVALID]).result()
    assert taken == [True] * len(VALID) + [False] * len(INVALID)
