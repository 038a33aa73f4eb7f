"""Command-line entry point of the study of memory and PCIe traffic in training with stock ZeRO-3 and
offloading: ``python -m studies.memory_wall``.
"""

from studies.memory_wall.command import main

if __name__ == "__main__":
    main()
