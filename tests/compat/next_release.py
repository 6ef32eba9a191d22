"""A program of the next release: this version with further steps of the schema.

`python -P next_release.py FOLDER_OF_STEPS ARGUMENTS OF fedplat-server`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedplat_server.cli import main
from support import migrations

if __name__ == "__main__":
    migrations.add_versions(Path(sys.argv[1]))
    sys.argv[:2] = ["fedplat-server"]
    main.main()
