"""Countries of the world: capital, continent and, for the larger ones, more."""

from dataclasses import dataclass

# name|capital, by continent; the member states of the United Nations and Vatican City. Where a
# country has more than one capital, the constitutional or most widely listed one.
_CAPITALS = {
    "Africa": (
        "Algeria|Algiers Angola|Luanda Benin|Porto-Novo Botswana|Gaborone "
        "Burkina_Faso|Ouagadougou Burundi|Gitega Cameroon|Yaoundé Cape_Verde|Praia "
        "the_Central_African_Republic|Bangui Chad|N'Djamena the_Comoros|Moroni "
        "the_Democratic_Republic_of_the_Congo|Kinshasa the_Republic_of_the_Congo|Brazzaville "
        "Djibouti|Djibouti Egypt|Cairo Equatorial_Guinea|Malabo Eritrea|Asmara Eswatini|Mbabane "
        "Ethiopia|Addis_Ababa Gabon|Libreville the_Gambia|Banjul Ghana|Accra Guinea|Conakry "
        "Guinea-Bissau|Bissau Ivory_Coast|Yamoussoukro Kenya|Nairobi Lesotho|Maseru "
        "Liberia|Monrovia Libya|Tripoli Madagascar|Antananarivo Malawi|Lilongwe Mali|Bamako "
        "Mauritania|Nouakchott Mauritius|Port_Louis Morocco|Rabat Mozambique|Maputo "
        "Namibia|Windhoek Niger|Niamey Nigeria|Abuja Rwanda|Kigali "
        "São_Tomé_and_Príncipe|São_Tomé Senegal|Dakar Seychelles|Victoria "
        "Sierra_Leone|Freetown Somalia|Mogadishu South_Africa|Pretoria South_Sudan|Juba "
        "Sudan|Khartoum Tanzania|Dodoma Togo|Lomé Tunisia|Tunis Uganda|Kampala Zambia|Lusaka "
        "Zimbabwe|Harare"
    ),
    "Asia": (
        "Afghanistan|Kabul Armenia|Yerevan Azerbaijan|Baku Bahrain|Manama Bangladesh|Dhaka "
        "Bhutan|Thimphu Brunei|Bandar_Seri_Begawan Cambodia|Phnom_Penh China|Beijing "
        "Georgia|Tbilisi India|New_Delhi Indonesia|Jakarta Iran|Tehran Iraq|Baghdad "
        "Israel|Jerusalem Japan|Tokyo Jordan|Amman Kazakhstan|Astana Kuwait|Kuwait_City "
        "Kyrgyzstan|Bishkek Laos|Vientiane Lebanon|Beirut Malaysia|Kuala_Lumpur "
        "the_Maldives|Malé Mongolia|Ulaanbaatar Myanmar|Naypyidaw Nepal|Kathmandu "
        "North_Korea|Pyongyang Oman|Muscat Pakistan|Islamabad the_Philippines|Manila "
        "Qatar|Doha Saudi_Arabia|Riyadh Singapore|Singapore South_Korea|Seoul "
        "Sri_Lanka|Sri_Jayawardenepura_Kotte Syria|Damascus Tajikistan|Dushanbe "
        "Thailand|Bangkok Timor-Leste|Dili Turkey|Ankara Turkmenistan|Ashgabat "
        "the_United_Arab_Emirates|Abu_Dhabi Uzbekistan|Tashkent Vietnam|Hanoi Yemen|Sanaa"
    ),
    "Europe": (
        "Albania|Tirana Andorra|Andorra_la_Vella Austria|Vienna Belarus|Minsk Belgium|Brussels "
        "Bosnia_and_Herzegovina|Sarajevo Bulgaria|Sofia Croatia|Zagreb Cyprus|Nicosia "
        "the_Czech_Republic|Prague Denmark|Copenhagen Estonia|Tallinn Finland|Helsinki "
        "France|Paris Germany|Berlin Greece|Athens Hungary|Budapest Iceland|Reykjavik "
        "Ireland|Dublin Italy|Rome Latvia|Riga Liechtenstein|Vaduz Lithuania|Vilnius "
        "Luxembourg|Luxembourg Malta|Valletta Moldova|Chișinău Monaco|Monaco "
        "Montenegro|Podgorica the_Netherlands|Amsterdam North_Macedonia|Skopje Norway|Oslo "
        "Poland|Warsaw Portugal|Lisbon Romania|Bucharest Russia|Moscow San_Marino|San_Marino "
        "Serbia|Belgrade Slovakia|Bratislava Slovenia|Ljubljana Spain|Madrid Sweden|Stockholm "
        "Switzerland|Bern Ukraine|Kyiv the_United_Kingdom|London Vatican_City|Vatican_City"
    ),
    "North America": (
        "Antigua_and_Barbuda|Saint_John's the_Bahamas|Nassau Barbados|Bridgetown "
        "Belize|Belmopan Canada|Ottawa Costa_Rica|San_José Cuba|Havana Dominica|Roseau "
        "the_Dominican_Republic|Santo_Domingo El_Salvador|San_Salvador Grenada|Saint_George's "
        "Guatemala|Guatemala_City Haiti|Port-au-Prince Honduras|Tegucigalpa Jamaica|Kingston "
        "Mexico|Mexico_City Nicaragua|Managua Panama|Panama_City "
        "Saint_Kitts_and_Nevis|Basseterre Saint_Lucia|Castries "
        "Saint_Vincent_and_the_Grenadines|Kingstown Trinidad_and_Tobago|Port_of_Spain "
        "the_United_States|Washington,_D.C."
    ),
    "South America": (
        "Argentina|Buenos_Aires Bolivia|Sucre Brazil|Brasília Chile|Santiago Colombia|Bogotá "
        "Ecuador|Quito Guyana|Georgetown Paraguay|Asunción Peru|Lima Suriname|Paramaribo "
        "Uruguay|Montevideo Venezuela|Caracas"
    ),
    "Oceania": (
        "Australia|Canberra Fiji|Suva Kiribati|South_Tarawa the_Marshall_Islands|Majuro "
        "Micronesia|Palikir Nauru|Yaren New_Zealand|Wellington Palau|Ngerulmud "
        "Papua_New_Guinea|Port_Moresby Samoa|Apia the_Solomon_Islands|Honiara "
        "Tonga|Nuku'alofa Tuvalu|Funafuti Vanuatu|Port_Vila"
    ),
}

# name|currency|main language|population in millions (rounded)|population of the capital in
# thousands (rounded): the countries a newcomer is likely to ask about, best known first.
_PROFILES = """
France|euro|French|68|2100
Germany|euro|German|84|3700
Japan|yen|Japanese|124|14000
Italy|euro|Italian|59|2800
Spain|euro|Spanish|48|3300
the United Kingdom|pound sterling|English|68|8900
Canada|Canadian dollar|English|40|1000
the United States|US dollar|English|335|700
China|yuan|Chinese|1410|21500
India|Indian rupee|Hindi|1430|250
Brazil|real|Portuguese|203|2800
Australia|Australian dollar|English|26|450
Mexico|Mexican peso|Spanish|129|9200
Russia|ruble|Russian|144|13000
Egypt|Egyptian pound|Arabic|110|10000
South Korea|won|Korean|52|9400
Portugal|euro|Portuguese|10|550
the Netherlands|euro|Dutch|18|920
Belgium|euro|Dutch|12|1200
Switzerland|Swiss franc|German|9|130
Austria|euro|German|9|2000
Sweden|Swedish krona|Swedish|10|980
Norway|Norwegian krone|Norwegian|5|710
Denmark|Danish krone|Danish|6|650
Finland|euro|Finnish|6|660
Poland|zloty|Polish|37|1860
Greece|euro|Greek|10|640
Turkey|Turkish lira|Turkish|85|5700
Argentina|Argentine peso|Spanish|46|3100
Chile|Chilean peso|Spanish|20|6200
Peru|sol|Spanish|34|10000
Colombia|Colombian peso|Spanish|52|7900
South Africa|rand|Zulu|62|740
Kenya|Kenyan shilling|Swahili|55|4400
Nigeria|naira|English|224|3600
Morocco|Moroccan dirham|Arabic|37|580
Ireland|euro|English|5|590
Iceland|Icelandic króna|Icelandic|0.4|140
Hungary|forint|Hungarian|10|1700
the Czech Republic|Czech koruna|Czech|11|1350
Romania|leu|Romanian|19|1700
Ukraine|hryvnia|Ukrainian|38|2900
Thailand|baht|Thai|72|5600
Vietnam|dong|Vietnamese|99|8000
Indonesia|rupiah|Indonesian|277|10600
Malaysia|ringgit|Malay|34|1800
the Philippines|Philippine peso|Filipino|117|1800
Singapore|Singapore dollar|English|6|5900
Saudi Arabia|Saudi riyal|Arabic|36|7700
Israel|shekel|Hebrew|10|980
Iran|rial|Persian|89|9000
Pakistan|Pakistani rupee|Urdu|240|1200
Bangladesh|taka|Bengali|172|10300
New Zealand|New Zealand dollar|English|5|210
Cuba|Cuban peso|Spanish|11|2100
Nepal|Nepalese rupee|Nepali|31|860
Bulgaria|euro|Bulgarian|6|1200
Croatia|euro|Croatian|4|770
Serbia|Serbian dinar|Serbian|7|1380
Mongolia|tugrik|Mongolian|3|1600
"""


@dataclass(frozen=True)
class Country:
    """What the demo model may know about one country."""

    name: str
    """The name inside a sentence, with its article: `the Netherlands`."""
    capital: str
    continent: str
    currency: str | None = None
    language: str | None = None
    population: int | None = None
    capital_population: int | None = None

    @property
    def bare(self) -> str:
        """The name without an article, as in a list or a JSON value."""
        return self.name.removeprefix("the ")

    @property
    def title(self) -> str:
        """The name as the first words of a sentence."""
        return self.name[0].upper() + self.name[1:]


def _parse() -> tuple[Country, ...]:
    profiles = dict(line.split("|", 1) for line in _PROFILES.strip().splitlines())
    order = list(profiles)
    found: list[Country] = []
    for continent, table in _CAPITALS.items():
        for entry in table.split():
            name, capital = entry.replace("_", " ").split("|")
            if name not in profiles:
                found.append(Country(name, capital, continent))
                continue
            currency, language, millions, thousands = profiles[name].split("|")
            found.append(
                Country(
                    name,
                    capital,
                    continent,
                    currency,
                    language,
                    int(float(millions) * 1_000_000),
                    int(thousands) * 1000,
                )
            )
    # The best known come first. Lists follow this order, so greedy answers start with familiar
    # names.
    return tuple(sorted(found, key=lambda c: order.index(c.name) if c.name in profiles else 999))


COUNTRIES: tuple[Country, ...] = _parse()
KNOWN: tuple[Country, ...] = tuple(country for country in COUNTRIES if country.currency)

ALIASES: dict[str, str] = {
    "USA": "the United States",
    "the USA": "the United States",
    "the US": "the United States",
    "the United States of America": "the United States",
    "UK": "the United Kingdom",
    "the UK": "the United Kingdom",
    "Great Britain": "the United Kingdom",
    "Czechia": "the Czech Republic",
    "the UAE": "the United Arab Emirates",
    "Holland": "the Netherlands",
    "Netherlands": "the Netherlands",
    "Philippines": "the Philippines",
    "United States": "the United States",
    "United Kingdom": "the United Kingdom",
    "Côte d'Ivoire": "Ivory Coast",
    "East Timor": "Timor-Leste",
    "Burma": "Myanmar",
}

SHARED_LANGUAGES: frozenset[str] = frozenset({"Canada", "Belgium", "Switzerland", "South Africa"})
"""Countries with several official languages; the answer about their language says so."""
