"""The data sets recipes can read: what they are, who publishes them, and whether a copy on disk is whole.

Nothing is imported to list them: how a set is checked is a dotted path to a function
`(path or None) -> findings`, which raises ConfigError if the set cannot be used.
"""

from dataclasses import dataclass
from pathlib import Path

from mutirao.config import load_name, nearest
from mutirao.errors import ConfigError


@dataclass(frozen=True)
class DataSet:
    """A set by what it holds, where to get it, how it lies on disk, and the function that checks it."""

    about: str
    source: str
    layout: str
    check: str


DATA_SETS = {
    "digits": DataSet(
        about="1,797 handwritten digits of 8 x 8 pixels in 10 classes",
        source="embedded: it comes with scikit-learn (from the UCI Machine Learning Repository)",
        layout="no files",
        check="mutirao.datasets.digits:check_digits",
    ),
    "generated": DataSet(
        about="FCube (data=fcube: a cube of 4 users with opposite octants) and Synthetic(alpha, beta) "
        "(data=synthetic-1-1 or other numbers, synthetic-iid: 30 users, 60 numbers, 10 classes)",
        source="embedded: made on the spot, as published (Li et al., ICDE 2022; Li et al., MLSys 2020)",
        layout="no files",
        check="mutirao.datasets.generated:check_generated",
    ),
    "cifar10": DataSet(
        about="60,000 colour pictures of 32 x 32 pixels in 10 classes; 'synthetic' is an embedded stand-in",
        source="University of Toronto, Alex Krizhevsky's page on CIFAR-10: the binary or the Python version",
        layout="a folder cifar-10-batches-bin or cifar-10-batches-py with data_batch_1 to 5 and test_batch in it",
        check="mutirao.datasets.cifar10:check_cifar10",
    ),
    "idx": DataSet(
        about="pictures of bytes with labels, such as MNIST and Fashion-MNIST (data=mnist, data=fashion-mnist)",
        source="Yann LeCun's page on MNIST, Zalando Research, or Debian's package dataset-fashion-mnist",
        layout="a folder with {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, plain or .gz",
        check="mutirao.datasets.idx:check_idx",
    ),
    "leaf": DataSet(
        about="samples by user, such as FEMNIST's 805,263 characters by 3,550 writers: partition=natural",
        source="LEAF: a benchmark for federated settings (github.com/TalwalkarLab/leaf), its preprocessed json",
        layout="a folder with train/ and test/ of *.json with users, num_samples and user_data",
        check="mutirao.datasets.leaf:check_leaf",
    ),
    "pictures": DataSet(
        about="pictures of anything by class (jpg, png, bmp, tif), or any labelled set here, as recipes read it",
        source="whoever publishes one folder a class, or a table of files",
        layout="a folder with one folder a class, Training/ and Test/ or client_*/ and global_test/ of that kind, or a "
        "CSV with columns file,label[,client][,group]",
        check="mutirao.datasets.labelled:check_labelled",
    ),
    "mslr": DataSet(
        about="web search: 136 features, grades 0 to 4; WEB10K has 10,000 queries and 1,200,192 documents, WEB30K "
        "three times as many; there is an embedded stand-in",
        source="Microsoft Research, Microsoft Learning to Rank Datasets: MSLR-WEB10K or MSLR-WEB30K",
        layout="a folder with Fold1 to Fold5, each with train.txt, vali.txt and test.txt (or .txt.gz)",
        check="mutirao.ranking.checking:check_mslr",
    ),
    "letor": DataSet(
        about="any ranking data of lines 'GRADE qid:ID 1:VALUE 2:VALUE ...'",
        source="whoever publishes in the form of LETOR or SVMlight",
        layout="one such file, plain or gzipped, or a folder with Fold1 to Fold5 of train.txt, vali.txt and test.txt",
        check="mutirao.ranking.checking:check_ranking",
    ),
    "ohsumed": DataSet(
        about="medical search: 106 queries, 16,140 documents, 25 features (LETOR 2) or 45 (LETOR 3), grades 0 to 2",
        source="Microsoft Research, LETOR 2.0 or 3.0: OHSUMED",
        layout="the folder with Data/Fold1/trainingset.txt and so on, or with QueryLevelNorm/Fold1/train.txt",
        check="mutirao.ranking.checking:check_ranking",
    ),
    "lightgbm": DataSet(
        about="ranking data without qid, such as LightGBM's example: 201 and 50 queries, 301 features, grades 0 to 4",
        source="whoever prepares files for LightGBM or XGBoost",
        layout="a folder with rank.train and rank.test, and beside each how many documents its queries have: "
        "rank.train.query or rank.train.group",
        check="mutirao.ranking.checking:check_ranking",
    ),
    "trec": DataSet(
        about="features with judgements apart, as TREC publishes them",
        source="NIST, or whoever judges in the form of TREC",
        layout="a folder with a file *qrels* of lines 'QUERY ITERATION DOCUMENT GRADE', and a file of features (or a "
        "train.txt, vali.txt and test.txt) of lines '0 qid:QUERY 1:VALUE ... # DOCUMENT'",
        check="mutirao.ranking.checking:check_ranking",
    ),
    "movielens": DataSet(
        about="ratings of films: 100K, 1M, 10M, 20M or 25M of them; there is an embedded stand-in",
        source="GroupLens Research, University of Minnesota: MovieLens ml-100k, ml-1m, ml-10m, ml-20m, ml-25m",
        layout="a folder with u.data and u.item, ratings.dat and movies.dat, or ratings.csv and movies.csv",
        check="mutirao.recsys.reading:check_ratings",
    ),
    "netflix": DataSet(
        about="100,480,507 ratings of 17,770 films by 480,189 users, with dates",
        source="the Netflix Prize's nf_prize_dataset",
        layout="a folder with movie_titles.txt and training_set/mv_*.txt, or combined_data_*.txt",
        check="mutirao.recsys.reading:check_ratings",
    ),
    "mq2008": DataSet(
        about="the TREC million query track of 2008: 784 queries, 15,211 documents, 46 features, grades 0 to 2",
        source="Microsoft Research, LETOR 4.0: MQ2008 (supervised ranking)",
        layout="a folder with Fold1 to Fold5, each with train.txt, vali.txt and test.txt (or .txt.gz)",
        check="mutirao.ranking.checking:check_ranking",
    ),
    "aol4foltr": DataSet(
        about="web search of 10,000 people in 2006: 2.6 million queries with user and time, 20 documents each of 103 "
        "features, the one that was clicked marked",
        source="Gregoriadis, Kang and Pouwelse, 2025: AOL4FOLTR, Zenodo 15689455",
        layout="a folder with metadata.csv (qid, user_id, timestamp, ...) and letor.txt (or letor.txt.gz)",
        check="mutirao.ranking.online.log:check_log",
    ),
    "tabular": DataSet(
        about="any table of numbers, categories and dates, with missing values; breast_cancer, wine and diabetes are "
        "embedded",
        source="your own; the embedded ones come with scikit-learn",
        layout="a CSV or Parquet file with a header, of any delimiter and encoding, or a folder with a file a client",
        check="mutirao.tabular.reading:check_table",
    ),
    "sipakmed": DataSet(
        about="4,049 single cells of Pap smears in 5 classes, cut out of 966 images",
        source="University of Ioannina, SIPaKMeD (Plissiti et al., 2018)",
        layout="a folder with im_Dyskeratotic/im_Dyskeratotic/CROPPED/*.bmp and so on for each class",
        check="mutirao.datasets.cervical:check_sipakmed",
    ),
    "mendeley_lbc": DataSet(
        about="963 images of liquid-based cytology in 4 classes of the Bethesda system, of 460 patients",
        source="Mendeley Data, zddtpgzv63 (Hussain et al., 2019)",
        layout="a folder with one folder for each of the four classes, named in full",
        check="mutirao.datasets.cervical:check_lbc",
    ),
    "cric": DataSet(
        about="11,534 cells of conventional smears in 6 classes of the Bethesda system, as points in 400 images",
        source="CRIC Searchable Image Database, Cervix Cell Classification (Rezende et al., 2021)",
        layout="a folder with classifications.json or .csv, and the images beside it or in a folder there",
        check="mutirao.datasets.cervical:check_cric",
    ),
    "hicervix": DataSet(
        about="40,229 cells in 29 classes on three levels, with a test set of its own",
        source="HiCervix (Cai et al., 2024), on request",
        layout="a folder with train.csv, val.csv and test.csv (image_name, class_name), and train/, val/ and test/",
        check="mutirao.datasets.cervical:check_hicervix",
    ),
    "cells": DataSet(
        about="pictures of cells in folders by class, such as Herlev's 917 in 7 classes, or tiles of slides",
        source="Herlev University Hospital and DTU, or whoever publishes one folder a class",
        layout="a folder with one folder a class, or Training/ and Test/ of that kind",
        check="mutirao.datasets.folders:check_pictures",
    ),
}


def check_data_set(name: str, path: Path | str | None = None) -> list[str]:
    """Read a data set as its recipe would; a few lines say what was found."""
    if name not in DATA_SETS:
        raise ConfigError(f"no data set is called {name!r}{nearest(name, DATA_SETS)}")
    findings: list[str] = load_name(DATA_SETS[name].check)(path)
    return findings
