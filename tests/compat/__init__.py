"""What the package relies on in other libraries' private names: tests of meaning, one file for each library."""
