"""`python -m piper`: the same as the console script `piper`."""

from piper.cli import run_process

if __name__ == "__main__":
    run_process()
