from eepo.adapters.verl.launch import main

main()
