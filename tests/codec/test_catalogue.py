import pytest

from hvdx.codec import CODECS, Bfloat16, Float16, Raw, Threshold, make
from hvdx.errors import ConfigError


def test_names_and_numbers_are_those_of_the_format():
    assert {name: (cls, cls.number) for name, cls in CODECS.items()} == {
        "none": (Raw, 0),
        "fp16": (Float16, 1),
        "bf16": (Bfloat16, 2),
        "threshold": (Threshold, 3),
    }


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("treshold", {}, "expected one of none, fp16, bf16, threshold. Did you mean 'threshold'"),
        ("", {}, "expected one of none, fp16, bf16, threshold"),
        ("threshold", {"density": 0.1}, "unknown option 'density'.*target_density"),
        ("bf16", {"tau": 0.1}, "unknown option 'tau'. Its options: none"),
    ],
)
def test_make_refuses_and_lists_what_is_right(name, options, text):
    with pytest.raises(ConfigError, match=text):
        make(name, **options)


def test_make_passes_options_on():
    codec = make("threshold", target_density=0.01, index_coding="none")
    assert repr(codec) == "Threshold(target_density=0.01, index_coding='none')"
    assert repr(make("bf16")) == "Bfloat16()"
