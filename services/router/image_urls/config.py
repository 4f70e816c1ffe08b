"""Settings of images named by URL."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from epd.config import option
from services.router.image_urls.allowed_hosts import AllowedHosts


@dataclass(frozen=True)
class ImageUrlConfig:
    """Whose images the router downloads, and how much it bears while doing so."""

    image_url_hosts: tuple[str, ...] = option(
        (),
        help="hosts that images may be downloaded from over https: a name, .name for all names "
        "below it, either with :port where that is not 443; none is off",
    )
    image_url_networks: tuple[str, ...] = option(
        (),
        help="networks that are not public and may be reached all the same, such as an image "
        "store's, in CIDR notation",
    )
    image_url_ca_file: Path | None = option(
        None, help="certificates of authorities to trust in place of the system's (PEM)"
    )
    image_url_timeout_s: float = option(
        10.0, help="longest download of one image, redirects included", unit="s", minimum=0.1
    )
    image_url_redirects: int = option(3, help="most redirects on the way to an image", minimum=0)
    image_url_downloads: int = option(
        32, help="downloads at once, others wait their turn", minimum=1
    )

    def __post_init__(self) -> None:
        AllowedHosts(self.image_url_hosts)
        for network in self.image_url_networks:
            ipaddress.ip_network(network)  # ValueError names what it cannot read
