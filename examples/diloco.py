"""The main job: DiLoCo on a small language model, and what it is compared with.

    python -m examples.diloco

See `examples/reproductions/diloco.py`, which this runs.
"""

import tyro

from examples.reproductions.diloco import Config, main

if __name__ == "__main__":
    main(tyro.cli(Config))
