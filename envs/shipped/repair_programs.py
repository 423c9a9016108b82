"""Small functions for PythonRepair to break. Each loops only over its arguments, so that a broken one also ends.

The first line of a docstring specifies the function for the model; `DRAWERS` draw arguments for it.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from typing import Any

# These programs imitate beginners' code, which a model repairs.
# ruff: noqa: SIM108, SIM110, PERF401


def count_vowels(text: str) -> int:
    """Return how many characters of text are vowels (a, e, i, o, u; lower or upper case)."""
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count = count + 1
    return count


def second_largest(numbers: list[int]) -> int | None:
    """Return the second largest different number, or None if there are fewer than two different ones."""
    found = sorted(set(numbers))
    if len(found) < 2:
        return None
    return found[-2]


def running_total(numbers: list[int]) -> list[int]:
    """Return the list of sums of the first 1, 2, 3, ... numbers."""
    total = 0
    totals = []
    for number in numbers:
        total = total + number
        totals.append(total)
    return totals


def is_palindrome(text: str) -> bool:
    """Return True if text reads the same backwards, ignoring case and everything that is no letter."""
    letters = [letter.lower() for letter in text if letter.isalpha()]
    for index in range(len(letters) // 2):
        if letters[index] != letters[len(letters) - 1 - index]:
            return False
    return True


def count_between(numbers: list[int], low: int, high: int) -> int:
    """Return how many of the numbers lie between low and high, both included."""
    count = 0
    for number in numbers:
        if number >= low and number <= high:
            count = count + 1
    return count


def longest_run(text: str) -> int:
    """Return the length of the longest run of one repeated character, 0 for an empty text."""
    best = 0
    length = 0
    for index in range(len(text)):
        if index > 0 and text[index] == text[index - 1]:
            length = length + 1
        else:
            length = 1
        if length > best:
            best = length
    return best


def count_pairs(numbers: list[int], target: int) -> int:
    """Return how many pairs of different positions hold two numbers whose sum is target."""
    count = 0
    for first in range(len(numbers)):
        for second in range(first + 1, len(numbers)):
            if numbers[first] + numbers[second] == target:
                count = count + 1
    return count


def caesar(text: str, shift: int) -> str:
    """Return text with every lower-case letter moved shift places on in the alphabet, around its end."""
    result = ""
    for letter in text:
        if "a" <= letter <= "z":
            result = result + chr((ord(letter) - 97 + shift) % 26 + 97)
        else:
            result = result + letter
    return result


def divisors(number: int) -> list[int]:
    """Return all positive divisors of a positive number, in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def rotate(items: list[int], places: int) -> list[int]:
    """Return the items moved to the right by so many places, those at the end coming to the front."""
    if not items:
        return []
    cut = len(items) - places % len(items)
    return items[cut:] + items[:cut]


def leap_years(first: int, last: int) -> list[int]:
    """Return the leap years of the Gregorian calendar from first to last, both included."""
    years = []
    for year in range(first, last + 1):
        if (year % 4 == 0 and year % 100 != 0) or year % 400 == 0:
            years.append(year)
    return years


def compress(text: str) -> str:
    """Return text with each run of a character as the character and the run's length: aab becomes a2b1."""
    result = ""
    count = 0
    for index in range(len(text)):
        count = count + 1
        if index + 1 == len(text) or text[index + 1] != text[index]:
            result = result + text[index] + str(count)
            count = 0
    return result


def balanced(text: str) -> bool:
    """Return True if every ( in text has its ) behind it, and the other way round."""
    depth = 0
    for letter in text:
        if letter == "(":
            depth = depth + 1
        elif letter == ")":
            depth = depth - 1
            if depth < 0:
                return False
    return depth == 0


def median(numbers: list[int]) -> float:
    """Return the median of a non-empty list: the middle number, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


Drawer = Callable[[random.Random], tuple[Any, ...]]


def _numbers(chance: random.Random, least: int = 0) -> list[int]:
    return [chance.randint(-9, 9) for _ in range(chance.randint(least, 8))]


def _text(chance: random.Random, letters: str) -> str:
    return "".join(chance.choices(letters, k=chance.randint(0, 12)))


def _mirrored(chance: random.Random) -> tuple[Any, ...]:
    half = _text(chance, "aBb c")
    return (half + half[::-1].swapcase() if chance.random() < 0.6 else half + "ab",)


def _limits(chance: random.Random) -> tuple[Any, ...]:
    low = chance.randint(-6, 3)
    return _numbers(chance), low, low + chance.randint(0, 6)


def _years(chance: random.Random) -> tuple[Any, ...]:
    first = chance.choice((1896, 1996, 1900, 2000, chance.randint(1880, 2020)))
    return first, first + chance.randint(0, 12)


DRAWERS: Mapping[Callable[..., Any], Drawer] = {
    count_vowels: lambda chance: (_text(chance, string.ascii_letters + "aeiouAEIOU  "),),
    second_largest: lambda chance: (_numbers(chance),),
    running_total: lambda chance: (_numbers(chance),),
    is_palindrome: _mirrored,
    count_between: _limits,
    longest_run: lambda chance: (_text(chance, "ab"),),
    count_pairs: lambda chance: (_numbers(chance), chance.randint(-5, 5)),
    caesar: lambda chance: (_text(chance, "abcxyzABZ !"), chance.randint(-30, 30)),
    divisors: lambda chance: (chance.randint(1, 60),),
    rotate: lambda chance: (_numbers(chance), chance.randint(-10, 10)),
    leap_years: _years,
    compress: lambda chance: (_text(chance, "aab"),),
    balanced: lambda chance: (_text(chance, "()x"),),
    median: lambda chance: (_numbers(chance, 1),),
}
