"""The command line: typer commands that call one function each and print what it found."""
