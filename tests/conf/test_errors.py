"""Characters of stored texts that a terminal may show."""

import time
import traceback

import pytest

from conf.errors import OUTPUT_STARTS, error_line


def traced(raising):
    try:
        raising()
    except Exception:
        return traceback.format_exc()


def plain():
    raise RuntimeError("CUDA error: no kernel image\nFor debugging consider\n  CUDA_LAUNCH_BLOCKING=1")


def chained():
    try:
        plain()
    except RuntimeError as error:
        raise TypeError("a'; echo foo") from error


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (traced(plain), "RuntimeError: CUDA error: no kernel image"),
        (traced(chained), "TypeError: a'; echo foo"),
        (traced(lambda: compile("x = = 1", "a file", "exec")), "SyntaxError: invalid syntax"),
        (traced(lambda: {}["key"]), "KeyError: 'key'"),
        (traced(plain).partition("\n")[2], "RuntimeError: CUDA error: no kernel image"),  # its beginning was cut off
        (traced(chained) + OUTPUT_STARTS + "\n" + traced(plain), "TypeError: a'; echo foo"),
        ("the server died; it said:\n" + traced(plain), "RuntimeError: CUDA error: no kernel image"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("Traceback ...\nNotImplementedError: no kernel\nmore", "NotImplementedError: no kernel"),
        ("\n not done after trial.timeout_s=3 s\nTraceback\n", "not done after trial.timeout_s=3 s"),
        ("\x1b[31mred\u202e\nmore", "\\x1b[31mred\\u202e"),
        ('zoo: cannot open\n  File "/x" is missing', "zoo: cannot open"),
        ("", ""),
    ],
)
def test_the_line_of_an_error_is_its_exception_and_never_the_heading_of_a_traceback(text, line):
    assert error_line(text) == line


def test_hostile_text_is_read_in_linear_time():
    from conf.device_names import split_slice
    from warehouse.exchange.dataset import scrub

    began = time.process_time()
    for text in ("1" * 100_000, "a_" * 50_000, "/a" * 50_000, " " * 100_000, "act" * 30_000, " MIG " * 20_000):
        for read in (scrub, error_line, split_slice):
            read(text + "!")
    assert scrub("see http://host17:9400/x and (ftp://a)") == "see http://ADDRESS/x and (ftp://ADDRESS)"
    assert time.process_time() - began < 5
