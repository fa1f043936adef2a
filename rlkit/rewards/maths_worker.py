"""The worker script of `rlkit.rewards.maths`: compares answers with math-verify, one per line, until its input ends.

math-verify's own time limits are off, because they report a time-out as a wrong answer. The process that asks kills a
worker that takes too long. If that process has ended, an alarm ends the worker, even while no Python code can run.
"""

import functools
import json
import math
import os
import re
import resource
import signal
import sys

MEMORY = 4 << 30  # bytes of address space; a tower of powers could otherwise take all memory

UNICODE = str.maketrans(
    {"−": "-", "–": "-", "°": r"^\circ ", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty "}
)

THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?: \d{3})+(?!\d)")  # with plain spaces; not the year in "2024 100 men"
NOT_UNITS = r"tens|dozens|hundreds|thousands|\w*illions|halves|thirds|quarters|\w+ths|plus|minus"
UNITS = re.compile(  # plurals after a number at the end, such as "eggs" and "miles per hour"; math-verify knows others
    rf"(?<=\d) +(?!(?:{NOT_UNITS})\b)(?:people|children|[a-z]{{3,}}s)(?: per [a-z]+)?$"
)
LEFT_SIDES = re.compile(  # all those at the beginning of equations without words, such as "12 - 4 = 2*4 = "
    r"""^(?:
          (?: \\[a-zA-Z]++      # a command of LaTeX, of any length,
            | \\.               # an escaped character, such as \$,
            | (?! [^\W\d_]{2}  # or another character that does not begin a word,
                | [,.;:]\s | (?<=[\w$)])\s\(  # end a clause, open a remark in brackets,
              )
              [^=\\<>!]        # or belong to >= or !=
          )*+
          =\s*+
        )++""",
    re.VERBOSE,
)
PERCENT = re.compile(r"\s*(?:\\?%|\bpercent\b)")
# what math-verify overlooks
RELATION = re.compile(r"\\(?:neq?|[lg]eq?(?:slant)?|[lg]t|not)(?![a-zA-Z])|<(?!<)|[>≤≥≠]|!=")
UNIT = r"(?:\\(?:text|mathrm|rm)\{[^{}]*\}|[a-z]{2,})"
QUANTITIES = re.compile(rf"(?:(?:\s|\\[ ,])*\d+(?:\.\d+)?(?:\s|\\[ ,])*{UNIT}){{2,}}")  # 3 hours 20 minutes
BASE = re.compile(r"[\dA-F]+_\{?(\d+)\}?")  # 1010_2
# f(-1), T_2(-1), f'(-1): math-verify reads -f
FUNCTION_VALUE = re.compile(r"[a-zA-Z]\}?(?:[_^](?:\w|\{[^{}]*\}))?'*\(")
NAMED_SQUARE = re.compile(r"(?:r|s|sigma|chi)(?:_\S+)?\*\*2")  # R^2, the variances s^2 and \sigma^2, \chi^2


def cleaned(text: str) -> str:
    """The text without spellings that math-verify misreads: mathematical signs as Unicode characters, delimiters and a
    full stop around the whole formula, spaces between thousands, `\\varnothing`, repeating decimals, units in words."""
    text = text.strip().translate(UNICODE).replace(r"\varnothing", r"\emptyset")
    text = re.sub(r"(?<=\d)(\\[,!;: ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))", "", text).rstrip(" .")
    text = THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)
    text = re.sub(r"(?<=\d) +i\b", "i", text)
    text = re.sub(r"(\d{0,99})\.(\d{0,99})\\overline\{(\d{1,99})\}", _fraction, text)
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and left not in inside:
            text = inside.strip()
            break
    return UNITS.sub("", text)


def _fraction(decimal: re.Match) -> str:
    """A repeating decimal as a fraction."""
    whole, once, again = decimal.groups()
    top = int(whole + once + again) - int(whole + once or "0")
    return rf"\frac{{{top}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def is_sentence(text: str) -> bool:
    """Whether a text is more than one formula: it has words, units, currencies or formulas between dollars."""
    text = re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+", "", text)
    return re.search(r"[^\W\d_]{2}|\d ?[^\W\d_]|[^\x00-\x7f]|\$", text) is not None


@functools.lru_cache(1024)
def parsed(text: str, boxed: bool = True) -> list:
    """A final answer as math-verify's expressions, or as its text where math-verify cannot read it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(rf"\boxed{{{text}}}" if boxed else text, targets, parsing_timeout=None)


def is_unsolved(part: object) -> bool:
    """Whether this is an equation such as x + 1 = 5, -x = 5 or x^2 = 25, whose right side is not the value of x. The
    right side of m + n = 5, f(2) = 5, 2 + 3 = 5 or R^2 = 0.5 may be the answer."""
    from sympy import Eq, Number

    if not isinstance(part, Eq) or NAMED_SQUARE.fullmatch(str(part.lhs)):
        return False
    symbols = part.lhs.free_symbols
    others = part.lhs.atoms() - symbols
    only_numbers = len(others) > 0 and all(isinstance(other, Number) for other in others)
    return len(symbols) == 1 and only_numbers and bool(part.lhs.is_polynomial())


def differs(text: str, gold: str) -> bool:
    """Whether two answers differ in what math-verify overlooks: a relation before a number, later quantities, bases."""
    if RELATION.match(text) and not RELATION.match(gold):
        return True
    if QUANTITIES.fullmatch(gold):
        numbers = re.findall(r"\d+", gold)
        return re.findall(r"\d+", text)[: len(numbers)] != numbers
    base, gold_base = BASE.fullmatch(text), BASE.fullmatch(gold)
    return base is not None and gold_base is not None and base[1] != gold_base[1]


def verdict(answer: str, gold: str, boxed: bool, marked: bool) -> bool | None:
    """Whether the two are equal; None if the gold response cannot be read and is not the same text."""
    gold_text, text = cleaned(gold), cleaned(answer)
    if (boxed or marked) and differs(text, gold_text):
        return False
    if is_equal(text, gold_text, boxed, marked):
        return True
    numbers = PERCENT.sub("", text), PERCENT.sub("", gold_text)  # 12.5% is 0.125, and also 12.5
    if numbers != (text, gold_text) and is_equal(*numbers, boxed, marked):
        return True
    return False if any(not isinstance(part, str) for part in parsed(gold_text)) else None


def is_equal(text: str, gold_text: str, boxed: bool, marked: bool) -> bool:
    """math-verify's comparison of two cleaned answers."""
    from math_verify import verify
    from sympy import Eq

    wanted, given = parsed(gold_text), parsed(text)
    if not boxed and is_sentence(text):  # its formulas stand between dollars, or are numbers
        begins_with_result = marked and not re.match(r"[^\W\d_]{2}", text)
        if begins_with_result:  # math-verify takes the first formula after these words
            result = text if "=" in gold_text else LEFT_SIDES.sub("", text)
            text = f"The final answer is {result}"
        given = given + parsed(text, boxed=False)
    names_a_value = FUNCTION_VALUE.search(text.replace(r"\left", ""))
    if not names_a_value and not any(isinstance(part, Eq) for part in wanted):
        given = [part for part in given if not is_unsolved(part)]
    return verify(wanted, given, timeout_seconds=None, allow_set_relation_comp=True)


def main(questions: int, verdicts: int) -> None:
    """Answer [answer, gold, boxed, marked, seconds] by true, false or null, in JSON, a line each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    parsed("1")  # the import, and the patterns
    os.write(verdicts, b"ready\n")
    with os.fdopen(questions) as lines:
        for line in lines:
            answer, gold, boxed, marked, seconds = json.loads(line)
            signal.alarm(2 + math.ceil(5 * seconds))
            try:
                is_equal = verdict(answer, gold, boxed, marked)
            except (MemoryError, RecursionError):
                is_equal = None
            signal.alarm(0)
            os.write(verdicts, json.dumps(is_equal).encode() + b"\n")


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    own_output = os.dup(1)
    os.dup2(2, 1)  # output of a library must not be read as a verdict
    main(0, own_output)
