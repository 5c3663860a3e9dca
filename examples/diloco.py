"""The main job: DiLoCo on a small language model, and what it is compared with.

    python -m examples.diloco

See `examples/reproductions/diloco.py`, which this runs.
"""

if __name__ == "__main__":
    # Not above: worker processes import this file, and need nothing of it.
    import tyro

    from examples.reproductions.diloco import Config, main

    main(tyro.cli(Config))
