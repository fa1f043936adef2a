"""Started by torchrun: the runs that a JSON file lists, one after the other, in one process a rank."""

import json
import sys
from pathlib import Path

from helpers import run_here

if __name__ == "__main__":
    for recipe, *arguments in json.loads(Path(sys.argv[1]).read_text()):
        run_here(recipe, *arguments)
