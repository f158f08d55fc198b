"""Published data sets that recipes read: what each is, where it is to be had and on what terms, and what checks a copy.

Nothing is imported to list them: how a set is checked is a dotted path to a function
`(path or None) -> findings`, which raises ConfigError if the set cannot be used.
"""

from dataclasses import dataclass

GROUPLENS = "https://files.grouplens.org/datasets/movielens"
FASHION_MNIST = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
CIFAR = "https://www.cs.toronto.edu/~kriz"
SIPAKMED = "https://www.cs.uoi.gr/~marina/SIPAKMED"
LAMBDARANK = "https://raw.githubusercontent.com/microsoft/LightGBM/v4.6.0/examples/lambdarank"
LETOR = "https://www.microsoft.com/en-us/research/project/letor-learning-rank-information-retrieval/"


@dataclass(frozen=True)
class File:
    """A file that its publisher offers to everybody.

    `checksum` is "sha256:..." or "md5:..." as the publisher or a library that many use has it; where there is none, the
    first copy's is kept and later ones must have it. Of an archive the folder `inside` is taken, without files whose
    names match `leave_out`.
    """

    url: str
    size: int = 0  # bytes, 0 where it is not known
    checksum: str = ""
    inside: str = ""
    leave_out: str = ""

    @property
    def name(self) -> str:
        """The last part of its address."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """A set by what it holds, who publishes it where and on what terms, how it lies on disk, and what checks it.

    `folders` are the names it may have in a folder of data sets. A set without `files` is not fetched: `by_hand` says
    what to do instead.
    """

    about: str
    layout: str
    check: str
    source: str
    page: str = ""
    terms: str = ""
    size: str = ""
    folders: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    by_hand: str = ""


def idx_files(base: str, files: dict[str, tuple[int, str]]) -> tuple[File, ...]:
    """The four files of MNIST's form, with their bytes and sha256."""
    return tuple(File(f"{base}/{name}-ubyte.gz", size, f"sha256:{sha}") for name, (size, sha) in files.items())


def movielens(name: str, about: str, size: str, bytes_: int, checksum: str, inside: str = "") -> DataSet:
    """One of GroupLens' sets of ratings."""
    return DataSet(
        about=about,
        layout="a folder with u.data and u.item, ratings.dat and movies.dat, or ratings.csv and movies.csv",
        check="mutirao.systems.recsys.readers:check_ratings",
        source="GroupLens Research, University of Minnesota: MovieLens",
        page="https://grouplens.org/datasets/movielens/",
        terms="for research; no commercial use without permission; cite Harper and Konstan, 2015",
        size=size,
        folders=(name,),
        files=(File(f"{GROUPLENS}/{name}.zip", bytes_, checksum, inside or name),),
    )


# Checksums are those of TensorFlow Datasets (sha256) or of GroupLens (md5). SIPaKMeD's are of no publisher: two
# projects that fetched it found the same. LightGBM's are of the files in its repository.
PUBLISHED = {
    "digits": DataSet(
        about="1,797 handwritten digits of 8 x 8 pixels in 10 classes",
        layout="no files",
        check="mutirao.datasets.digits:check_digits",
        source="embedded: it comes with scikit-learn",
        page="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        terms="CC BY 4.0",
    ),
    "generated": DataSet(
        about="FCube (data=fcube: a cube of 4 users with opposite octants) and Synthetic(alpha, beta) "
        "(data=synthetic-1-1 or other numbers, synthetic-iid: 30 users, 60 numbers, 10 classes)",
        layout="no files",
        check="mutirao.datasets.generated:check_generated",
        source="embedded: made on the spot, as published (Li et al., ICDE 2022; Li et al., MLSys 2020)",
        terms="none: it is made by this program",
    ),
    "mnist": DataSet(
        about="70,000 handwritten digits of 28 x 28 pixels in 10 classes",
        layout="a folder with {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, plain or .gz",
        check="mutirao.datasets.idx:check_idx",
        source="Yann LeCun and Corinna Cortes: MNIST",
        page="https://yann.lecun.com/exdb/mnist/",
        terms="CC BY-SA 3.0",
        size="12 MB",
        folders=("mnist", "MNIST/raw"),
        files=idx_files(
            MNIST,
            {
                "train-images-idx3": (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                "train-labels-idx1": (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                "t10k-images-idx3": (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                "t10k-labels-idx1": (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            },
        ),
    ),
    "fashion-mnist": DataSet(
        about="70,000 grey pictures of clothes of 28 x 28 pixels in 10 classes",
        layout="a folder with {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, plain or .gz",
        check="mutirao.datasets.idx:check_idx",
        source="Zalando Research, or Debian's package dataset-fashion-mnist",
        page="https://github.com/zalandoresearch/fashion-mnist",
        terms="MIT",
        size="31 MB",
        folders=("fashion-mnist", "FashionMNIST/raw"),
        files=idx_files(
            FASHION_MNIST,
            {
                "train-images-idx3": (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
                "train-labels-idx1": (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
                "t10k-images-idx3": (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
                "t10k-labels-idx1": (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            },
        ),
    ),
    "femnist": DataSet(
        about="805,263 handwritten characters of 28 x 28 pixels in 62 classes by 3,550 writers: partition=natural",
        layout="a folder with train/ and test/ of *.json with users, num_samples and user_data",
        check="mutirao.datasets.leaf:check_leaf",
        source="LEAF: a benchmark for federated settings (Caldas et al., 2018), made of NIST's Special Database 19",
        page="https://github.com/TalwalkarLab/leaf/tree/master/data/femnist",
        terms="LEAF: BSD 2-clause; NIST's pictures: public domain in the USA",
        folders=("femnist/data", "femnist"),
        by_hand="LEAF makes it of NIST's pictures on your machine: clone the repository, and in data/femnist run "
        "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample",
    ),
    "cifar10": DataSet(
        about="60,000 colour pictures of 32 x 32 pixels in 10 classes; 'synthetic' is an embedded stand-in",
        layout="a folder cifar-10-batches-bin or cifar-10-batches-py with data_batch_1 to 5 and test_batch in it",
        check="mutirao.datasets.cifar10:check_cifar10",
        source="Alex Krizhevsky, University of Toronto: the binary or the Python version",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        terms="no licence is stated; cite Krizhevsky, 2009",
        size="170 MB",
        folders=("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10"),
        files=(
            File(
                f"{CIFAR}/cifar-10-binary.tar.gz",
                170052171,
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                inside="cifar-10-batches-bin",
            ),
        ),
    ),
    "cifar100": DataSet(
        about="60,000 colour pictures of 32 x 32 pixels in 100 classes (data=cifar100) of 20 kinds "
        "(data=cifar100-coarse)",
        layout="a folder cifar-100-binary with train.bin and test.bin, or cifar-100-python with train, test and meta",
        check="mutirao.datasets.cifar100:check_cifar100",
        source="Alex Krizhevsky, University of Toronto: the binary or the Python version",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        terms="no licence is stated; cite Krizhevsky, 2009",
        size="169 MB",
        folders=("cifar-100-binary", "cifar-100-python", "cifar100"),
        files=(
            File(
                f"{CIFAR}/cifar-100-binary.tar.gz",
                168513733,
                "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                inside="cifar-100-binary",
            ),
        ),
    ),
    "ml-100k": movielens(
        *("ml-100k", "100,000 ratings of 1,682 films (1998)", "4.9 MB", 4924029),
        "sha256:50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
    ),
    "ml-1m": movielens(
        *("ml-1m", "1,000,209 ratings of 3,706 films (2000)", "5.9 MB", 5917549),
        "sha256:a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
    ),
    "ml-10m": movielens(
        *("ml-10m", "10,000,054 ratings of 10,681 films (2009)", "66 MB", 65566137),
        "md5:ce571fd55effeba0271552578f2648bd",
        "ml-10M100K",
    ),
    "ml-20m": movielens(
        *("ml-20m", "20,000,263 ratings of 27,278 films (2015)", "199 MB", 198702078),
        "sha256:96f243c338a8665f6bcc89c53edf6ee39162a846940de6b7c8c48aeada765ff3",
    ),
    "ml-25m": movielens(
        *("ml-25m", "25,000,095 ratings of 62,423 films (2019)", "262 MB", 261978986),
        "sha256:8b21cfb7eb1706b4ec0aac894368d90acf26ebdfb6aced3ebd4ad5bd1eb9c6aa",
    ),
    "ml-32m": movielens(
        *("ml-32m", "32,000,204 ratings of 87,585 films (2023)", "239 MB", 238950008),
        "md5:d472be332d4daa821edc399621853b57",
    ),
    "netflix": DataSet(
        about="100,480,507 ratings of 17,770 films by 480,189 users, with dates",
        layout="a folder with movie_titles.txt and training_set/mv_*.txt, or combined_data_*.txt",
        check="mutirao.systems.recsys.readers:check_ratings",
        source="the Netflix Prize's nf_prize_dataset",
        page="https://www.kaggle.com/datasets/netflix-inc/netflix-prize-data",
        terms="for research under the rules of the Netflix Prize; no redistribution",
        folders=("netflix",),
        by_hand="Netflix no longer hands it out; Kaggle has a copy behind its login",
    ),
    "mslr": DataSet(
        about="web search: 136 features, grades 0 to 4; WEB10K has 10,000 queries and 1,200,192 documents, WEB30K "
        "three times as many; there is an embedded stand-in",
        layout="a folder with Fold1 to Fold5, each with train.txt, vali.txt and test.txt (or .txt.gz)",
        check="mutirao.systems.ranking.ranking_sources:check_mslr",
        source="Microsoft Research, Microsoft Learning to Rank Datasets: MSLR-WEB10K or MSLR-WEB30K",
        page="https://www.microsoft.com/en-us/research/project/mslr/",
        terms="Microsoft Research licence agreement: for research, no redistribution",
        folders=("MSLR-WEB10K", "MSLR-WEB30K", "MSLR"),
        by_hand="its licence is agreed to on the page, which has the download",
    ),
    "mq2008": DataSet(
        about="the TREC million query track of 2008: 784 queries, 15,211 documents, 46 features, grades 0 to 2",
        layout="a folder with Fold1 to Fold5, each with train.txt, vali.txt and test.txt (or .txt.gz)",
        check="mutirao.systems.ranking.ranking_sources:check_ranking",
        source="Microsoft Research, LETOR 4.0: MQ2008 (supervised ranking)",
        page=LETOR,
        terms="Microsoft Research licence agreement: for research, no redistribution",
        folders=("MQ2008",),
        by_hand="its licence is agreed to on the page, which has the download",
    ),
    "ohsumed": DataSet(
        about="medical search: 106 queries, 16,140 documents, 25 features (LETOR 2) or 45 (LETOR 3), grades 0 to 2",
        layout="the folder with Data/Fold1/trainingset.txt and so on, or with QueryLevelNorm/Fold1/train.txt",
        check="mutirao.systems.ranking.ranking_sources:check_ranking",
        source="Microsoft Research, LETOR 2.0 or 3.0: OHSUMED",
        page=LETOR,
        terms="Microsoft Research licence agreement: for research, no redistribution",
        folders=("OHSUMED",),
        by_hand="its licence is agreed to on the page, which has the download",
    ),
    "aol4foltr": DataSet(
        about="web search of 10,000 people in 2006: 2.6 million queries with user and time, 20 documents each of 103 "
        "features, the one that was clicked marked",
        layout="a folder with metadata.csv (qid, user_id, timestamp, ...) and letor.txt (or letor.txt.gz)",
        check="mutirao.systems.ranking.online.query_log:check_log",
        source="Gregoriadis, Kang and Pouwelse, 2025: AOL4FOLTR",
        page="https://zenodo.org/records/15689455",
        terms="those of its Zenodo record; people can be recognised by what they searched for",
        folders=("aol4foltr",),
        by_hand="read the terms of its record, which has the download",
    ),
    "lightgbm": DataSet(
        about="LightGBM's ranking example, without qid: 201 and 50 queries, 301 features, grades 0 to 4",
        layout="a folder with rank.train and rank.test, and beside each how many documents its queries have: "
        "rank.train.query or rank.train.group",
        check="mutirao.systems.ranking.ranking_sources:check_ranking",
        source="Microsoft: LightGBM's examples; whoever prepares files for LightGBM or XGBoost",
        page="https://github.com/microsoft/LightGBM/tree/master/examples/lambdarank",
        terms="MIT",
        size="3.1 MB",
        folders=("lightgbm",),
        files=(
            File(
                f"{LAMBDARANK}/rank.train",
                2479271,
                "sha256:a0c7201c89120879c14a5059e091f441cbf2a29b8aaef363885ccb1a530448df",
            ),
            File(
                f"{LAMBDARANK}/rank.test",
                649930,
                "sha256:3b1219ce117a0a36d2f76c02de7e7831c1d79af0d40f5195c03178bbe26c824b",
            ),
            File(
                f"{LAMBDARANK}/rank.train.query",
                580,
                "sha256:40cb5fef637229311cd30fab13cb7fb633b023e86a87ff04ec55db420143d6af",
            ),
            File(
                f"{LAMBDARANK}/rank.test.query",
                146,
                "sha256:36dca82ba3bf99201bac3987b00a8fbf6fe5f563e9fa6d0da90e783710a32df4",
            ),
        ),
    ),
    "herlev": DataSet(
        about="917 single cells of Pap smears in 7 classes",
        layout="a folder with one folder a class, such as normal_superficiel and carcinoma_in_situ",
        check="mutirao.datasets.class_folders:check_pictures",
        source="Herlev University Hospital and the Technical University of Denmark (Jantzen et al., 2005)",
        page="https://mde-lab.aegean.gr/index.php/downloads/",
        terms="no licence is stated; cite Jantzen et al., 2005",
        size="85 MB",
        folders=("herlev",),
        files=(
            File(
                "https://mde-lab.aegean.gr/images/stories/docs/smear2005.zip",
                inside="New database pictures",
                leave_out="*-d.bmp",
            ),
        ),
    ),
    "sipakmed": DataSet(
        about="4,049 single cells of Pap smears in 5 classes, cut out of 966 images",
        layout="a folder with im_Dyskeratotic/im_Dyskeratotic/CROPPED/*.bmp and so on for each class",
        check="mutirao.datasets.cervical:check_sipakmed",
        source="University of Ioannina (Plissiti et al., 2018)",
        page="https://www.cs.uoi.gr/~marina/sipakmed.html",
        terms="free for experiments; no licence is stated; cite Plissiti et al., 2018",
        size="5.2 GB",
        folders=("sipakmed", "SIPaKMeD"),
        files=tuple(
            File(f"{SIPAKMED}/{name}.7z", size, f"sha256:{sha}")
            for name, size, sha in (
                ("im_Dyskeratotic", 1182980549, "a8768bc03c9e814063ff946b7ef7548067e16b760168267d2b12e95a66955cce"),
                ("im_Koilocytotic", 1290478065, "653578e878e3cc63a8510cd7ec26d918637d9881e913e29a5bb205d0d9cfb70d"),
                ("im_Metaplastic", 1396480123, "97f1badc5f606f127d2af0d18a008ebd41a2b60f44785cb332a6eaa33004d2af"),
                ("im_Parabasal", 548667699, "13e9c29f016a5b83731e038cfe518671a7815df28836dee706acba6ecd2369a8"),
                (
                    "im_Superficial-Intermediate",
                    762939737,
                    "3b73e406df14d60b1bd9c8ac3b01b594e70bb51ba32fb080141fc6a7f489a599",
                ),
            )
        ),
    ),
    "mendeley_lbc": DataSet(
        about="963 images of liquid-based cytology in 4 classes of the Bethesda system, of 460 patients",
        layout="a folder with one folder for each of the four classes, named in full",
        check="mutirao.datasets.cervical:check_lbc",
        source="Mendeley Data (Hussain et al., 2019)",
        page="https://data.mendeley.com/datasets/zddtpgzv63/4",
        terms="CC BY 4.0",
        folders=("mendeley_lbc",),
        by_hand="the page has a button that downloads all of it",
    ),
    "cric": DataSet(
        about="11,534 cells of conventional smears in 6 classes of the Bethesda system, as points in 400 images",
        layout="a folder with classifications.json or .csv, and the images beside it or in a folder there",
        check="mutirao.datasets.cervical:check_cric",
        source="CRIC Searchable Image Database, Cervix Cell Classification (Rezende et al., 2021)",
        page="https://doi.org/10.6084/m9.figshare.c.4960286.v2",
        terms="CC BY 4.0",
        folders=("cric",),
        by_hand="the page has the table and the images, in several downloads",
    ),
    "hicervix": DataSet(
        about="40,229 cells in 29 classes on three levels, with a test set of its own",
        layout="a folder with train.csv, val.csv and test.csv (image_name, class_name), and train/, val/ and test/",
        check="mutirao.datasets.cervical:check_hicervix",
        source="HiCervix (Cai et al., 2024)",
        page="https://zenodo.org/records/11087263",
        terms="those of its Zenodo record",
        folders=("hicervix",),
        by_hand="ask for it, or fetch it, as its record says",
    ),
}
