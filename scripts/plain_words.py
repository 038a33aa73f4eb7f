"""A check that the docstrings and the newest commit's subject are written plainly.

    python scripts/plain_words.py            # part of make lint; exit code 1 with what to change
    python scripts/plain_words.py --list     # every docstring that counts against the limits

A docstring says what name, types and body do not, so each package has few lines of docstrings for its lines of code.
A docstring of a function should begin with an imperative verb, and one of a class or module with a noun.
The limits on the number of exceptions may only become stricter.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ebbtide", "simulator", "tuner", "profiler", "runtime", "studies", "scripts", "examples")
# Largest allowed percentages of all docstrings. Lower them when the measured percentages are lower.
MOST_ODD_PCT, MOST_KNOTTED_PCT = 0.5, 1.0
MOST_SUBJECT_CHARACTERS = 72
# Largest allowed lines of docstrings divided by lines of code. The aim is 0.22 for each package.
MOST_LINES = {"simulator": 0.255, "tuner": 0.205, "profiler": 0.175, "runtime": 0.23, "studies": 0.205, "tests": 0.06}
ODD = re.compile(
    r"(what|whether|how|where|when|which|who|whom|whose|why|of|in|on|at|by|behind|before|after|besides?|between|from|to|for"
    r"|with|without|until|till|as|than|through|throughout|under|over|above|below|into|onto|since|while|if|though|although"
    r"|because|else|also|so|this|these|those|that|it|its|their|they|he|she|there|here|nobody|somebody|everybody|whoever"
    r"|whatever|wherever|nothing|not|never|only|just|both|either|neither|still|yet|once)\b(?!')",
    re.IGNORECASE,
)
KNOTS = re.compile(
    r"\b(of which|of whom|in which|by which|for which|whose|who|whom|nobody|somebody|whoever|behind|besides?|else)\b",
    re.IGNORECASE,
)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place ("FILE:LINE") and the text of every docstring of a module, class or function in the project."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text:
                        yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def lines_over_code(package: Path) -> float:
    """Return the lines of a package's docstrings divided by its lines of code. Comments count nowhere."""
    documented = code = 0
    for path in package.rglob("*.py"):
        lines, own = path.read_text().splitlines(), set[int]()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                ast.get_docstring(node, clean=False) is not None
            ):
                own.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        for number, line in enumerate(lines, 1):
            if line.strip():
                documented += number in own
                code += number not in own and not line.strip().startswith("#")
    return documented / max(1, code)


def begins_oddly(text: str) -> bool:
    """Return True if a docstring begins with a pronoun, a question word or a preposition, which often means that its
    subject is missing.
    """
    return bool(ODD.match(text.lstrip("`'\"(")))


def is_knotted(text: str) -> bool:
    """Return True if a docstring's first paragraph has a word or phrase that makes sentences hard to read, such as "of
    which" or "whoever".
    """
    return bool(KNOTS.search(text.split("\n\n")[0]))


def newest_subject() -> str:
    """Return the subject of the newest commit that is not a merge, or an empty string outside a checkout."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--no-merges", "--format=%s"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def problems(found: list[tuple[str, str]], subject: str) -> list[str]:
    """Return a list with a sentence for each limit of this check that is exceeded.

    Args:
        found: Place and text of every docstring.
        subject: Subject of the newest commit.
    """
    shares = {
        "begin with a relative, a preposition or a pronoun": (begins_oddly, MOST_ODD_PCT),
        "have a knot in their first paragraph": (is_knotted, MOST_KNOTTED_PCT),
    }
    result = []
    for package, most in MOST_LINES.items():
        lines = lines_over_code(ROOT / package)
        if lines > most:
            result.append(
                f"{package} has {lines:.3f} lines of docstrings for a line of code. The limit is {most}. Leave out "
                "what name, types and body say, and write a reason as a comment at its line."
            )
    for what, (counts, most_pct) in shares.items():
        pct = 100 * sum(counts(text) for _, text in found) / max(1, len(found))
        if pct > most_pct:
            result.append(f"{pct:.1f}% of docstrings {what}. The limit is {most_pct}%. See --list.")
    if len(subject) > MOST_SUBJECT_CHARACTERS:
        result.append(
            f"The newest commit's subject has {len(subject)} characters. The limit is "
            f"{MOST_SUBJECT_CHARACTERS}. Move the story into the body."
        )
    return result


def main() -> None:
    """Print which limits the project's docstrings and the newest commit's subject exceed. Exit with 1 if any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--list",
        action="store_true",
        help="print every docstring that begins with a pronoun, a question word or a preposition, or is hard to read",
    )
    found = list(docstrings())
    if parser.parse_args().list:
        for place, text in found:
            if begins_oddly(text) or is_knotted(text):
                print(f"{place}: {text.splitlines()[0]}")
    wrong = problems(found, newest_subject())
    print("\n".join(wrong) or f"plain words: {len(found)} docstrings, within the limits")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
