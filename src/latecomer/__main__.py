from latecomer.cli import main

main()
