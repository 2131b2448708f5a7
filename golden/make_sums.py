"""Write golden/SHA256SUMS: the hash of every file that is not a script. Run after the other ``make_*.py``."""

import hashlib
from pathlib import Path

GOLDEN = Path(__file__).parent
SUMS = GOLDEN / "SHA256SUMS"


def sums() -> str:
    """One line a file, as ``sha256sum`` prints and checks it."""
    files = [
        *GOLDEN.glob("tiny/*"),
        *GOLDEN.glob("fixtures/**/*.safetensors"),
        *GOLDEN.glob("kdt16m/**/*"),
        *GOLDEN.glob("measurements/*"),
    ]
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(GOLDEN).as_posix()}\n"
        for path in sorted(files)
        if path.is_file() and path.suffix != ".md"
    )


if __name__ == "__main__":
    SUMS.write_text(sums(), encoding="utf-8")
