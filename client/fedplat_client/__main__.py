"""Run the command `fedplat-client` as `python -m fedplat_client`."""

from fedplat_client.cli import main

if __name__ == "__main__":
    main()
