"""The forms in which anybody may publish, or keep, data of their own: how such files lie, and what checks them."""

from mutirao.datasets.published import DataSet

FORMS = {
    "movielens": DataSet(
        about="ratings of films as MovieLens has them; there is an embedded stand-in",
        layout="a folder with u.data and u.item, ratings.dat and movies.dat, or ratings.csv and movies.csv",
        check="mutirao.systems.recsys.readers:check_ratings",
        source="GroupLens' sets are ml-100k, ml-1m, ml-10m, ml-20m and ml-25m",
    ),
    "idx": DataSet(
        about="pictures of bytes with labels, such as MNIST and Fashion-MNIST",
        layout="a folder with {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, plain or .gz",
        check="mutirao.datasets.idx:check_idx",
        source="anybody who publishes in MNIST's format",
    ),
    "leaf": DataSet(
        about="samples by user, such as FEMNIST: partition=natural",
        layout="a folder with train/ and test/ of *.json with users, num_samples and user_data",
        check="mutirao.datasets.leaf:check_leaf",
        source="LEAF's preprocessed json",
    ),
    "pictures": DataSet(
        about="pictures of anything by class (jpg, png, bmp, tif), or any labelled set here, as recipes read it",
        layout="a folder with one folder a class, Training/ and Test/ or client_*/ and global_test/ of that kind, or a "
        "CSV with columns file,label[,client][,group]",
        check="mutirao.datasets.labelled:check_labelled",
        source="anybody who publishes one folder a class, or a table of files",
    ),
    "cells": DataSet(
        about="pictures of cells in folders by class, such as Herlev's, or tiles of slides",
        layout="a folder with one folder a class, or Training/ and Test/ of that kind",
        check="mutirao.datasets.class_folders:check_pictures",
        source="anybody who publishes one folder a class",
    ),
    "letor": DataSet(
        about="any ranking data of lines 'GRADE qid:ID 1:VALUE 2:VALUE ...'",
        layout="one such file, plain or gzipped, or a folder with Fold1 to Fold5 of train.txt, vali.txt and test.txt",
        check="mutirao.systems.ranking.ranking_sources:check_ranking",
        source="anybody who publishes in the format of LETOR or SVMlight",
    ),
    "trec": DataSet(
        about="features with judgements apart, as TREC publishes them",
        layout="a folder with a file *qrels* of lines 'QUERY ITERATION DOCUMENT GRADE', and a file of features (or a "
        "train.txt, vali.txt and test.txt) of lines '0 qid:QUERY 1:VALUE ... # DOCUMENT'",
        check="mutirao.systems.ranking.ranking_sources:check_ranking",
        source="NIST, or anybody who judges in TREC's format",
    ),
    "tabular": DataSet(
        about="any table of numbers, categories and dates, with missing values; breast_cancer, wine and diabetes are "
        "embedded",
        layout="a CSV or Parquet file with a header, of any delimiter and encoding, or a folder with a file a client",
        check="mutirao.systems.tabular.readers:check_table",
        source="your own; the embedded ones come with scikit-learn",
    ),
}
