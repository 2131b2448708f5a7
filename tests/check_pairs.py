"""Check that each notebook agrees with its script and holds the outputs that nbval compares.

    python tests/check_pairs.py notebooks

prints one line per fault and exits with 1 if there is one. It is part of ``make check`` and of the tests.
nbval alone is not enough: it passes a cell without a count unseen, and it never looks at the script.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

MOST_LINES = 500
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])(?:/[\w.+-]+){2,}|\b[A-Za-z]:\\\w")


def faults(folder: Path) -> list[str]:
    """What is wrong with the pairs of a folder, one line each, the file's name first."""
    found = []
    for stem in sorted({path.stem for path in folder.glob("*.py")} | {path.stem for path in folder.glob("*.ipynb")}):
        script, notebook = folder / f"{stem}.py", folder / f"{stem}.ipynb"
        if not script.exists():
            found.append(f"{notebook.name}: no {script.name} beside it")
        elif not notebook.exists():
            found.append(f"{script.name}: no {notebook.name} beside it; make execute writes it")
        else:
            cells = nbformat.read(notebook, as_version=4).cells
            found += [f"{notebook.name}: {fault}" for fault in _disagreements(jupytext.read(script).cells, cells)]
            found += [f"{notebook.name}: {fault}" for fault in _faults_of_outputs(cells)]
            lines = len(script.read_text(encoding="utf-8").splitlines())
            if lines > MOST_LINES:
                found.append(f"{script.name}: {lines} lines, at most {MOST_LINES} make one sitting")
    return found


def _disagreements(script: list[NotebookNode], notebook: list[NotebookNode]) -> Iterator[str]:
    if len(script) != len(notebook):
        yield f"{len(notebook)} cells, its script has {len(script)}"
    for number, (ours, theirs) in enumerate(zip(script, notebook, strict=False), start=1):
        if ours.cell_type != theirs.cell_type:
            yield f"cell {number} is {theirs.cell_type}, in the script {ours.cell_type}"
        elif ours.source != theirs.source:
            yield f"cell {number} differs from the script, first in {_first_difference(ours.source, theirs.source)}"
        elif (tags := _tags(theirs)) != _tags(ours):
            yield f"cell {number} has tags {tags}, in the script {_tags(ours)}"
        else:
            continue
        return  # after the first difference, cells no longer stand opposite their partners


def _tags(cell: NotebookNode) -> list[str]:
    return sorted(cell.metadata.get("tags", []))


def _first_difference(script: str, notebook: str) -> str:
    ours, theirs = script.splitlines(), notebook.splitlines()
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"line {same + 1}: {''.join(theirs[same : same + 1])!r}, in the script {''.join(ours[same : same + 1])!r}"


def _faults_of_outputs(cells: list[NotebookNode]) -> Iterator[str]:
    expected = 1
    for number, cell in enumerate(cells, start=1):
        if cell.cell_type != "code":
            continue
        if cell.execution_count != expected:
            yield f"cell {number} has count {cell.execution_count}, expected {expected}: run it whole (make execute)"
        expected = (cell.execution_count or expected) + 1
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {number} holds an error, {output.ename}: {output.evalue}"
            elif path := ABSOLUTE_PATH.search(_text(output)):
                yield f"cell {number} printed a path of the machine that ran it, {path.group()!r}"


def _text(output: NotebookNode) -> str:
    return str(output.text if output.output_type == "stream" else output.data.get("text/plain", ""))


def main(folder: str) -> int:
    """Print the faults of a folder; the exit status."""
    found = faults(Path(folder))
    print("\n".join(found) if found else f"{folder}: each notebook agrees with its script and holds a whole run")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "notebooks"))
