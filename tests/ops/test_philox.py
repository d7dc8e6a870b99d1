"""Philox4x32-10 against the published vectors, and the Gumbel noise made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cardan.ops.philox import gumbel, philox4x32

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter, key, expected):
    assert tuple(int(word) for word in philox4x32(counter, key)) == expected


def test_published_vectors_hold_when_computed_together():
    counter = tuple(np.array([known[0][i] for known in KNOWN], dtype=np.uint32) for i in range(4))
    key = tuple(np.array([known[1][i] for known in KNOWN], dtype=np.uint32) for i in range(2))
    words = np.stack(philox4x32(counter, key), axis=-1)
    assert words.tolist() == [list(known[2]) for known in KNOWN]


def test_noise_is_the_definition_word_by_word():
    seed, position, token = 0x299F31D0A4093822, 1234567, 98765
    noise = gumbel(np.array([seed], np.uint64), np.array([position], np.int32), np.array([[token]], np.int32))
    block = philox4x32((token >> 2, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    u = (int(block[token & 3]) + 0.5) / 2**32
    assert noise.dtype == np.float32
    assert noise[0, 0] == np.float32(-math.log(-math.log(u)))


@pytest.mark.parametrize("width", [1, 3, 4, 5, 1001])
def test_all_ids_and_named_ids_agree(width):
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 3, dtype=np.uint64)
    positions = np.array([0, 7, 2**31 - 1], np.int32)
    whole = gumbel(seeds, positions, width)
    ids = rng.integers(0, width, (3, 17)).astype(np.int32)
    assert whole.shape == (3, width)
    np.testing.assert_array_equal(gumbel(seeds, positions, ids), np.take_along_axis(whole, ids.astype(int), 1))


def test_noise_depends_on_every_part_of_seed_and_position():
    def draw(seed, position):
        return gumbel(np.array([seed], np.uint64), np.array([position], np.int32), 64)

    base = draw(5, 9)
    for other in (draw(6, 9), draw(5 + 2**32, 9), draw(5, 10)):
        assert not np.array_equal(base, other)


def test_noise_has_the_moments_of_a_gumbel_distribution():
    noise = gumbel(np.arange(4, dtype=np.uint64), np.zeros(4, np.int32), 100_000).astype(np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772156649) < 0.01  # five standard errors are 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03


def test_extreme_words_stay_finite():
    from cardan.ops.philox import _noise_of_words

    noise = _noise_of_words(np.array([0, 2**32 - 1], np.uint32))
    np.testing.assert_allclose(noise, [-math.log(33 * math.log(2)), 33 * math.log(2)], rtol=1e-6)
