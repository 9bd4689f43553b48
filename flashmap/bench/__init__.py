"""The op's benchmark: ``flashmap bench``. command.py has its options; benchmarks/README.md says how it measures."""
