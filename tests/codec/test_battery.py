# Tests: hvdx/codec/base.py, hvdx/codec/floats.py, hvdx/codec/threshold.py

import pytest

from hvdx.codec import CODECS
from tests.codec.battery import CODEC_CHECKS, ROWS


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("check", CODEC_CHECKS.values(), ids=CODEC_CHECKS)
def test_codec_passes(check, row):
    check(row)


def test_every_codec_has_a_row():
    assert {row.name for row in ROWS.values()} == set(CODECS)
