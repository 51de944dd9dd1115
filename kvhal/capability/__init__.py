"""The capability table: cells and operations, their versions, the evidence behind them, and where the files are."""
