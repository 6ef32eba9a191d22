"""Secret sharing: any `threshold` shares of a secret recover it, and fewer reveal nothing of it.

Shamir 1979, "How to share a secret" (CACM), over a prime field above 2^256, so that every 32-byte secret is an element.
The share of a position is the value of a random polynomial at position + 1. Wrong shares are corrected as errors of a
Reed-Solomon code: Gao 2003, "A New Algorithm for Decoding Reed-Solomon Codes".
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation.messages import KEY_BYTES, SHARE_BYTES

PRIME = 2**256 + 297
"""The smallest prime above 2^256."""
_WIDE_BYTES = 49
"""Random bytes for an element: modulo `PRIME` they are within 2^-128 of uniform (RFC 9380, Section 5.2)."""
_REDUCE_EVERY = 16


def split(secret: bytes, threshold: int, holders: Sequence[int], random: Callable[[int], bytes]) -> list[bytes]:
    """Return the shares of a secret for the positions of its holders, in their order."""
    assert len(secret) == KEY_BYTES
    assert 1 <= threshold <= len(holders)
    drawn = random(_WIDE_BYTES * (threshold - 1))
    coefficients = [
        int.from_bytes(drawn[begin : begin + _WIDE_BYTES], "big") % PRIME for begin in range(0, len(drawn), _WIDE_BYTES)
    ]
    coefficients.append(int.from_bytes(secret, "big"))  # the highest power first, for Horner's rule
    return [_evaluate(coefficients, holder + 1).to_bytes(SHARE_BYTES, "big") for holder in holders]


def read_share(share: bytes) -> int:
    """Return a share as an element of the field. Raises `SecureAggregationError`."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise SecureAggregationError("a share is not an element of the field")
    return value


def recover(shares: Mapping[int, int], threshold: int) -> bytes | None:
    """Return the secret that the first `threshold` shares of holders recover; None: they are not of a secret."""
    assert len(shares) >= threshold
    holders = tuple(shares)[:threshold]
    products = map(operator.mul, _coefficients_at_zero(holders), shares.values())
    return _to_secret(sum(products) % PRIME)


def correct(shares: Mapping[int, int], threshold: int) -> tuple[bytes, frozenset[int]] | None:
    """Return the secret, and the holders whose shares are wrong.

    None: more than half of the shares beyond `threshold` are wrong. The work grows with the square of the shares.
    """
    holders = sorted(shares)
    points = [holder + 1 for holder in holders]
    values = [shares[holder] for holder in holders]
    polynomial = _decode(points, values, threshold)
    if polynomial is None:
        return None
    wrong = frozenset(
        holder
        for holder, point, value in zip(holders, points, values, strict=True)
        if _evaluate(polynomial[::-1], point) != value
    )
    secret = _to_secret(polynomial[0] if polynomial else 0)
    return None if secret is None else (secret, wrong)


def _to_secret(value: int) -> bytes | None:
    return value.to_bytes(KEY_BYTES, "big") if value.bit_length() <= 8 * KEY_BYTES else None


def _evaluate(coefficients: Sequence[int], point: int) -> int:
    """Evaluate a polynomial by Horner's rule. Points are small, so that reducing some of the steps is enough."""
    value = 0
    for begin in range(0, len(coefficients), _REDUCE_EVERY):
        for coefficient in coefficients[begin : begin + _REDUCE_EVERY]:
            value = value * point + coefficient
        value %= PRIME
    return value


@functools.lru_cache(maxsize=64)  # in a complete graph, all secrets have the same holders
def _coefficients_at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coefficients of Lagrange's interpolation at 0 for the shares of some holders."""
    points = [holder + 1 for holder in holders]
    numerator = math.prod(points) % PRIME
    denominators = [point * math.prod(other - point for other in points if other != point) % PRIME for point in points]
    return tuple(numerator * inverse % PRIME for inverse in _invert(denominators))


def _invert(values: Sequence[int]) -> list[int]:
    """Return the inverses of elements at the cost of one inversion (Montgomery's trick)."""
    products = [1]
    for value in values:
        products.append(products[-1] * value % PRIME)
    inverse = pow(products[-1], -1, PRIME)
    inverses = [0] * len(values)
    for index in range(len(values) - 1, -1, -1):
        inverses[index] = inverse * products[index] % PRIME
        inverse = inverse * values[index] % PRIME
    return inverses


def _decode(points: Sequence[int], values: Sequence[int], threshold: int) -> list[int] | None:
    """Return the polynomial of degree < `threshold` through most of the points (Gao 2003, Algorithm 1)."""
    remainder, following = _vanish_at(points), _interpolate(points, values)
    factor, next_factor = [0], [1]
    while 2 * (len(following) - 1) >= len(points) + threshold:
        quotient, rest = _divide(remainder, following)
        remainder, following = following, rest
        factor, next_factor = next_factor, _subtract(factor, _multiply(quotient, next_factor))
    polynomial, rest = _divide(following, next_factor)
    return polynomial if not rest and len(polynomial) <= threshold else None


def _vanish_at(points: Sequence[int]) -> list[int]:
    """Return the coefficients of the product of all (x - point), lowest power first, as below."""
    product = [1]
    for point in points:
        product = [(low - point * high) % PRIME for low, high in zip([0, *product], [*product, 0], strict=True)]
    return product


def _interpolate(points: Sequence[int], values: Sequence[int]) -> list[int]:
    """Return the polynomial through all points (Newton's divided differences)."""
    inverses = [0, *_invert(range(1, points[-1] - points[0] + 1))]
    differences = list(values)
    for order in range(1, len(points)):
        for index in range(len(points) - 1, order - 1, -1):
            inverse = inverses[points[index] - points[index - order]]
            differences[index] = (differences[index] - differences[index - 1]) * inverse % PRIME
    polynomial: list[int] = []
    for point, difference in zip(reversed(points), reversed(differences), strict=True):
        shifted = zip([0, *polynomial], [*polynomial, 0], strict=True)
        polynomial = [(low - point * high) % PRIME for low, high in shifted]
        polynomial[0] = (polynomial[0] + difference) % PRIME
    return _trim(polynomial)


def _trim(polynomial: list[int]) -> list[int]:
    while polynomial and not polynomial[-1]:
        polynomial.pop()
    return polynomial


def _divide(dividend: Sequence[int], divisor: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the quotient and the remainder of two polynomials."""
    rest = list(dividend)
    inverse = pow(divisor[-1], -1, PRIME)
    quotient = [0] * max(0, len(rest) - len(divisor) + 1)
    for shift in range(len(quotient) - 1, -1, -1):
        quotient[shift] = rest[shift + len(divisor) - 1] * inverse % PRIME
        for index, coefficient in enumerate(divisor):
            rest[shift + index] = (rest[shift + index] - quotient[shift] * coefficient) % PRIME
    return _trim(quotient), _trim(rest)


def _multiply(left: Sequence[int], right: Sequence[int]) -> list[int]:
    product = [0] * max(0, len(left) + len(right) - 1)
    for index, coefficient in enumerate(left):
        for other, value in enumerate(right):
            product[index + other] = (product[index + other] + coefficient * value) % PRIME
    return product


def _subtract(left: Sequence[int], right: Sequence[int]) -> list[int]:
    size = max(len(left), len(right))
    return _trim(
        [
            ((left[index] if index < len(left) else 0) - (right[index] if index < len(right) else 0)) % PRIME
            for index in range(size)
        ]
    )
